"""Every kernel variant is compiled for GPUs that are not here, and its machine code held to their limits."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux only")

ROOT = Path(__file__).parents[2]
# compute capability: KiB of shared memory that one block may have, and that a multiprocessor has
SHARED_KIB = {80: (163, 164), 90: (227, 228), 100: (227, 228)}
REGISTERS = 65536
KERNELS = {
    "adjust_logits_kernel",
    "sample_filtered_kernel",
    "token_logprobs_kernel",
    "block_weights_kernel",
    "sample_token_kernel",
    "merge_splits_kernel",
    "paged_decode_kernel",
    "paged_prefill_kernel",
    "rms_norm_kernel",
    "rotary_kv_write_kernel",
    "silu_mul_kernel",
}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By compute capability: the properties that `compile_kernels` prints, one dictionary a kernel variant."""

    def run(arch: int) -> list[dict[str, Any]]:
        command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(arch)]
        environment = os.environ | {
            "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp(f"triton-{arch}")),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "shared"), os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=840
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        return dict(zip(SHARED_KIB, threads.map(run, SHARED_KIB), strict=True))


def blocks_a_multiprocessor(params: dict[str, Any]) -> int:
    """How many programs run side by side, as far as registers and shared memory let them."""
    _, multiprocessor_kib = SHARED_KIB[params["arch"]]
    # a warp gets registers in steps of 256, a block 1 KiB of shared memory beside its own
    warp_registers: int = -(-params["registers"] * 32 // 256) * 256
    by_registers: int = REGISTERS // (warp_registers * params["num_warps"])
    by_shared_memory: int = multiprocessor_kib * 1024 // (params["shared_bytes"] + 1024)
    return min(by_registers, by_shared_memory)


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_every_kernel_compiles(compiled: dict[int, list[dict[str, Any]]], arch: int) -> None:
    assert {params["kernel"] for params in compiled[arch]} == KERNELS
    assert len(compiled[arch]) >= 30


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_nothing_spills_to_memory(compiled: dict[int, list[dict[str, Any]]], arch: int) -> None:
    assert [params for params in compiled[arch] if params["spilled_bytes"] > 0] == []


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_shared_memory_fits(compiled: dict[int, list[dict[str, Any]]], arch: int) -> None:
    block_kib, _ = SHARED_KIB[arch]
    assert [params for params in compiled[arch] if params["shared_bytes"] > block_kib * 1024] == []


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_decode_programs_share_a_multiprocessor_so_that_one_computes_while_others_load(
    compiled: dict[int, list[dict[str, Any]]], arch: int
) -> None:
    decodes = [params for params in compiled[arch] if params["kernel"] == "paged_decode_kernel"]
    assert [params for params in decodes if blocks_a_multiprocessor(params) < 2] == []
    # two blocks of keys and values on their way while a third is read would be 96 KiB; one on its way is 32 KiB
    assert {params["variant"] for params in decodes if params["shared_bytes"] < 64 * 1024} == set()
