"""Which instructions kernels use: what is found, what the environment may ask for, and a machine that has none.

And what a kernel that is kept on disk depends on.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import weir.kv.geometry
import weir.model.cpu.forward
import weir.model.cpu.workspace
import weir.ops.cpu.linear
import weir.ops.simd.integer
from weir.core.file_lock import StillLocked
from weir.ops.simd.features import (
    InstructionSet,
    available_instruction_sets,
    features_from,
    instruction_set,
    parse_features,
)
from weir.ops.simd.jit import compiling_alone, kernel_sources

ROOT = Path(__file__).parents[2]

AVX2 = {"avx2": True, "fma": True, "f16c": True}
AVX512 = dict.fromkeys(("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"), True)
AMX = dict.fromkeys(("amx-tile", "amx-int8"), True)

# prints a digest of results of every kernel here, after a forced choice of instructions
DIGEST = """
import hashlib, numpy as np
from tests.kernels.cpu_linear_cases import KINDS, random_case
from weir.ops.cpu.head_norm import norm_heads
from weir.ops.cpu.linear import linear_range
from weir.ops.cpu.quantize import quantize_rows
from weir.ops.cpu.quantized_rows import records_of
from tests.kernels.whole_ops import gelu_mul_quantize, rms_norm_quantize, silu_mul_quantize
from weir.ops.cpu.softcap import cap_rows
digest, random = hashlib.sha256(), np.random.default_rng(1)
inputs = random.standard_normal((3, 128)).astype(np.float32)
heads = np.ascontiguousarray(inputs[:, ::-1])
norm_heads(heads, inputs[:2, :32], 2, 1, 1e-5, 0, 3)
digest.update(heads.tobytes())
cap_rows(heads, np.float32(0.7))
digest.update(heads.tobytes())
gated = (silu_mul_quantize(inputs * 9), gelu_mul_quantize(inputs * 9))
for rows in (quantize_rows(inputs), rms_norm_quantize(inputs, inputs[0], 1e-5), *gated):
    for field in ("values", "scale", "scaled_sum", "correction"):
        digest.update(records_of(rows)[field].tobytes())
for kind in KINDS:
    rows, matrix, _, _ = random_case(random, kind, 7, 33, 96)
    out = np.empty((7, 33), np.float32)
    linear_range(rows, matrix.data, int(kind), out, False, 0, 3)
    digest.update(out.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize(
    ("features", "fastest"),
    [
        ({}, InstructionSet.PORTABLE),
        ({"avx2": True, "fma": True}, InstructionSet.PORTABLE),
        (AVX2, InstructionSet.AVX2),
        (AVX2 | {"avxvnni": True}, InstructionSet.AVX_VNNI),
        (AVX2 | AVX512, InstructionSet.AVX512_VNNI),
        (AVX2 | AVX512 | {"avx512vl": False}, InstructionSet.AVX2),
        (AVX512, InstructionSet.PORTABLE),
        (AVX2 | AVX512 | AMX, InstructionSet.AMX),
        (AVX2 | AVX512 | AMX | {"amx-int8": False}, InstructionSet.AVX512_VNNI),
        (AVX2 | AMX, InstructionSet.AVX2),
    ],
)
def test_the_fastest_instruction_set_that_is_all_there(features: dict[str, bool], fastest: InstructionSet) -> None:
    assert features_from(features).instruction_sets[-1] is fastest
    assert features_from(features).instruction_sets[0] is InstructionSet.PORTABLE


def test_feature_lists_are_read_as_llvm_writes_them() -> None:
    assert parse_features("+avx2, -avx512f,+sse4.1,") == {"avx2": True, "avx512f": False, "sse4.1": True}


def test_the_environment_chooses_among_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIR_CPU_KERNELS", raising=False)
    assert instruction_set() is available_instruction_sets()[-1]
    monkeypatch.setenv("WEIR_CPU_KERNELS", "portable")
    assert instruction_set() is InstructionSet.PORTABLE
    monkeypatch.setenv("WEIR_CPU_KERNELS", "sse9")
    with pytest.raises(ValueError, match="WEIR_CPU_KERNELS is 'sse9'; this processor runs portable"):
        instruction_set()


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="names x86-64 instructions")
def test_a_processor_without_vector_extensions_gives_the_same_bits() -> None:
    oldest = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse,+sse2,+cx8,+cmov,+fxsr,+mmx,+64bit"}
    assert digest_with(oldest) == digest_with({"WEIR_CPU_KERNELS": "portable"}) == digest_with({})


def digest_with(environment: dict[str, str]) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_CPU", "WEIR_CPU"))}
    ran = subprocess.run(
        [sys.executable, "-c", DIGEST],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_name_of_the_cache_depends_on_the_forward_pass_what_it_is_made_of_and_numbers_compiled_in() -> None:
    sources = {str(path) for path in kernel_sources()}
    forward = (weir.model.cpu.forward, weir.model.cpu.workspace)
    modules = (*forward, weir.ops.cpu.linear, weir.ops.simd.integer, weir.kv.geometry)
    assert {module.__file__ for module in modules} <= sources


def test_a_process_that_compiles_for_ever_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.ops.simd.jit._COMPILING_TIMEOUT_S", 0.2)
    monkeypatch.setattr("weir.ops.simd.jit.kernel_cache_directory", lambda: tmp_path)
    with compiling_alone():
        lock = tmp_path / "lock"
        with pytest.raises(StillLocked, match=f"compiling kernels: another process has held {lock}"), compiling_alone():
            raise AssertionError("two compile")
    with compiling_alone():
        pass
