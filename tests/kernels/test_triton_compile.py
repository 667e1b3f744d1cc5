"""Every kernel variant is compiled for GPUs that are not here, and its machine code held to their limits.

By the Triton that is installed for each of them, and by the oldest that Weir takes for one, where it was unpacked:
`make triton-oldest` (190 MB to get, 640 MB on the disk).
"""

import json
import os
import subprocess
import sys
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
    "exact_linear_kernel",
    "sample_token_kernel",
    "fp8_product_kernel",
    "quantize_rows_kernel",
    "gated_quantize_kernel",
    "paged_decode_kernel",
    "paged_prefill_kernel",
    "rms_norm_kernel",
    "rotary_kv_write_kernel",
    "gated_kernel",
}

pytestmark = pytest.mark.timeout(900)


OLDEST = "3.6.0"
OLDEST_FOLDER = Path(os.environ.get("WEIR_OLDEST_TRITON") or ROOT / "build" / f"triton-{OLDEST}")
OLDEST_ARCH = 90

# bytes of stack a thread: in fp32 the attention kernels have more values than registers (slow, not wrong)
MAX_FP32_STACK_BYTES = 1024
# decode has all the registers that a thread can have, and is fastest so: one warp for a key head, many programs
MAX_DECODE_STACK_BYTES = 128

Compiled = list[dict[str, Any]]
"""The properties that `compile_kernels` prints, one dictionary a kernel variant."""


def compile_all(arch: int, which: str, cache: Path, *first: Path) -> Compiled:
    """`which`: of the variants, as `compile_kernels.py` takes it. `first` on the module path: another Triton."""
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(arch), which]
    search_path = [*map(str, first), str(ROOT), str(ROOT / "shared"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(search_path)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=840)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((90, "widest"), id="90-widest"),
        *(pytest.param((arch, "every"), id=f"{arch}-every", marks=pytest.mark.long) for arch in (80, 90, 100)),
    ],
)
def target(request: pytest.FixtureRequest) -> tuple[int, str]:
    """A GPU, and which of the variants: every takes two minutes of processor time. What fits 80 has less shared memory;
    100 has the limits of 90."""
    found: tuple[int, str] = request.param
    return found


@pytest.fixture(scope="module")
def arch(target: tuple[int, str]) -> int:
    return target[0]


@pytest.fixture(scope="module")
def compiled(target: tuple[int, str], tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compile_all(*target, tmp_path_factory.mktemp(f"triton-{target[0]}"))


@pytest.fixture(scope="module")
def compiled_by_oldest(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    if not (OLDEST_FOLDER / "triton").is_dir():
        pytest.skip(f"{OLDEST_FOLDER} is not there: `make triton-oldest` gets 190 MB")
    return compile_all(OLDEST_ARCH, "every", tmp_path_factory.mktemp("triton-oldest"), OLDEST_FOLDER)


def allowed_stack_bytes(params: dict[str, Any]) -> int:
    if params["variant"].endswith("-fp32"):
        return MAX_FP32_STACK_BYTES
    return MAX_DECODE_STACK_BYTES if params["kernel"] == "paged_decode_kernel" else 0


def too_much_stack(found: Compiled) -> Compiled:
    return [params for params in found if params["stack_bytes"] > allowed_stack_bytes(params)]


def blocks_a_multiprocessor(params: dict[str, Any]) -> int:
    """How many programs run side by side, as far as registers and shared memory let them."""
    _, multiprocessor_kib = SHARED_KIB[params["arch"]]
    # a warp gets registers in steps of 256, a block 1 KiB of shared memory beside its own
    warp_registers: int = -(-params["registers"] * 32 // 256) * 256
    by_registers: int = REGISTERS // (warp_registers * params["num_warps"])
    by_shared_memory: int = multiprocessor_kib * 1024 // (params["shared_bytes"] + 1024)
    return min(by_registers, by_shared_memory)


def test_every_kernel_compiles(compiled: Compiled) -> None:
    assert {params["kernel"] for params in compiled} == KERNELS
    assert len(compiled) >= 28


def test_nothing_spills_to_memory_but_attention_a_little(compiled: Compiled) -> None:
    assert too_much_stack(compiled) == []


def test_attention_is_compiled_in_fp32_too(compiled: Compiled) -> None:
    kernels = {params["kernel"] for params in compiled if params["variant"].endswith("-fp32")}
    assert {"paged_decode_kernel", "paged_prefill_kernel", "rotary_kv_write_kernel"} <= kernels


def test_the_oldest_triton_compiles_every_kernel_within_the_same_limits(
    compiled_by_oldest: Compiled,
) -> None:
    assert {params["triton"] for params in compiled_by_oldest} == {OLDEST}
    assert {params["kernel"] for params in compiled_by_oldest} == KERNELS
    assert too_much_stack(compiled_by_oldest) == []
    block_kib, _ = SHARED_KIB[OLDEST_ARCH]
    assert [params for params in compiled_by_oldest if params["shared_bytes"] > block_kib * 1024] == []


def test_shared_memory_fits(compiled: Compiled, arch: int) -> None:
    block_kib, _ = SHARED_KIB[arch]
    assert [params for params in compiled if params["shared_bytes"] > block_kib * 1024] == []


def test_exact_products_fit_where_a_block_has_99_kib_and_two_of_them_where_a_multiprocessor_has_more(
    compiled: Compiled,
) -> None:
    products = [params for params in compiled if params["kernel"] == "exact_linear_kernel"]
    assert {params["variant"].rpartition("-")[2] for params in products} == {"bf16", "fp32"}
    assert [params for params in products if params["shared_bytes"] > 99 * 1024] == []
    assert [params for params in products if blocks_a_multiprocessor(params) < 2] == []
    assert too_much_stack(products) == []


def test_decode_programs_share_a_multiprocessor_so_that_one_computes_while_others_load(compiled: Compiled) -> None:
    decodes = [params for params in compiled if params["kernel"] == "paged_decode_kernel"]
    assert [params for params in decodes if blocks_a_multiprocessor(params) < 2] == []
    # of all programs together, blocks of keys and values that are on their way or read: what hides memory's latency
    bytes_in_flight = {p["variant"]: blocks_a_multiprocessor(p) * p["shared_bytes"] for p in decodes}
    assert {variant for variant, num_bytes in bytes_in_flight.items() if num_bytes < 112 * 1024} == set()
