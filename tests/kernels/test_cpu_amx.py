"""AMX, on a processor that has it or emulated: the same bits, the instructions that are meant, and when it is not used.

The emulator executes tile instructions and nothing else; it refuses what a processor would refuse.
"""

import json
import shutil
import subprocess
from pathlib import Path

import llvmlite.binding
import pytest
from llvmlite import ir
from tests.kernels.amx_machine import HAS_AMX, THIS_MACHINE, AmxMachine

from weir.ops.simd import amx
from weir.ops.simd.features import InstructionSet, available_instruction_sets, instruction_set

emulated = pytest.mark.skipif(HAS_AMX, reason="this processor has AMX, which cannot be made to fail")

CHOSEN = "from weir.ops.simd.features import *; print(instruction_set(), amx_problem())"

# prints a digest of the logits of a prompt of 77 tokens, cut into slices, and of a step of 21 sequences
FORWARD = """
import hashlib, sys
from pathlib import Path
import numpy as np
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.model.cpu.core_share import FixedShare
from weir.model.cpu.packed_weights import load_packed
from weir.model.cpu.runner import CpuDecoder, page_numbers
from weir.model.cpu.slices import cut_slices
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.source import resolve_model
from weir.model.precision import page_geometry
from weir.model.rows import ordered_chunks

source = resolve_model("dummy:tiny")
config = load_model_config(source)
packed = load_packed(source, config, model_digest(source, "int8"), Path(sys.argv[1]))
decoder = CpuDecoder(config, packed, FixedShare(2))
pages = page_numbers(config, np.zeros((64, page_geometry(config, "int8").page_bytes), np.uint8))
ids = np.random.default_rng(0).integers(0, config.vocab_size, 100).tolist()
greedy = SampleSpec(SamplingParams(temperature=0.0), 0)
prompt = ChunkPlan(0, 0, tuple(ids[:77]), tuple(range(7)), greedy)
answers = [ChunkPlan(slot, 0, (ids[slot],), (10 + slot,), greedy) for slot in range(21)]
digest = hashlib.sha256()
for chunks in ((prompt,), answers):
    ordered = ordered_chunks(StepPlan(0, tuple(chunks)), 64, config.vocab_size, config.max_context_tokens)
    for piece in cut_slices(*ordered, 50):
        digest.update(decoder.compute(piece, pages).logits[: len(piece.sampled)].tobytes())
print(digest.hexdigest())
"""

# a product of bfloat16, which the kernels do not use
UNKNOWN = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("c4e26a5cc1c3"))
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""

BENCHMARK = """
from benchmarks.kernels.instruction_sets import as_lines, measure
print("\\n".join(as_lines(measure((1, 17), 0.0, 100))))
"""

PROBE = """
from weir.ops.simd.amx_probe import probe
found = probe(timeout_s={timeout_s})
print(found.problem, found.is_of_processor)
"""

# as where the machine is short of something: the child is a program that does not get to a product
BAD_CHILD = """
import sys
from weir.ops.simd.amx_probe import find_problem
sys.executable = sys.argv[1]
print(find_problem())
"""

# another process, which has the lock, keeps an answer once this one waits for it
WAITING = """
import json, logging, sys, threading
from concurrent.futures import ThreadPoolExecutor
from weir.core.cache_dir import cache_dir
from weir.core.file_lock import file_lock
from weir.ops.simd.amx_probe import _machine, find_problem
waits = threading.Event()
log = logging.getLogger("weir.core.file_lock")
log.setLevel(logging.INFO)
log.addFilter(lambda record: waits.set() or True)
kernels = cache_dir() / "kernels"
kernels.mkdir()
with ThreadPoolExecutor() as pool:
    with file_lock(kernels / "amx.lock", "trying AMX", timeout_s=1):
        found = pool.submit(find_problem)
        assert waits.wait(100), "it does not wait"
        (kernels / "amx.json").write_text(json.dumps({"machine": _machine(), "problem": "found by the other"}))
    print(found.result())
"""

NO_BOOT_ID = """
from pathlib import Path
from weir.ops.simd import amx_probe
amx_probe._BOOT_ID = Path("/proc/no such file")
print(amx_probe.find_problem())
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> AmxMachine:
    return AmxMachine(tmp_path_factory.mktemp("amx"))


def test_it_is_chosen_where_it_works(machine: AmxMachine) -> None:
    assert machine.output_of(CHOSEN) == "amx None"
    assert machine.output_of(CHOSEN, WEIR_CPU_KERNELS="amx") == "amx None"
    assert machine.output_of(CHOSEN, WEIR_CPU_KERNELS="avx512-vnni") == "avx512-vnni None"


def test_linear_layers_pass_all_their_tests_with_it(machine: AmxMachine) -> None:
    # pytest's own handler of faults would take the place of the emulator's
    flags = ("-q", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-k", "amx or threads or wide")
    ran = machine.python("-m", "pytest", *flags, "tests/kernels/test_cpu_linear.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "19 passed" in ran.stdout, ran.stdout
    (folder,) = (path.name for path in machine.cache.glob("kernels/*") if path.is_dir())
    assert folder.startswith("amx-"), "kernels with tiles lie apart"


@pytest.mark.golden  # the whole forward pass is compiled for it: some 15 s of processor time
def test_a_whole_model_gives_the_same_bits(machine: AmxMachine, tmp_path: Path) -> None:
    found = machine.output_of(FORWARD, str(tmp_path), WEIR_CPU_KERNELS="amx")
    # by this machine's own kernels, which other tests compile too
    assert found == THIS_MACHINE.output_of(FORWARD, str(tmp_path), WEIR_CPU_KERNELS="avx512-vnni")


@pytest.mark.golden  # compiles linear layers for every instruction set
def test_the_benchmark_sets_it_beside_the_others(machine: AmxMachine) -> None:
    lines = machine.output_of(BENCHMARK).splitlines()
    assert lines[0].split() == ["GMAC/s,", "rows:", "1", "17"]
    assert [line.split(" 4b ")[1].rsplit(maxsplit=2)[0].strip() for line in lines if " 4b " in line] == [
        *("portable", "avx2", "avx-vnni", "avx512-vnni", "amx")
    ]
    assert lines[-1].startswith("products of tiles alone, 64 inputs: ")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump here, which reads machine code")
def test_the_machine_code_has_the_instructions_and_operands_that_are_meant(tmp_path: Path) -> None:
    module = ir.Module()
    number = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [number] * 3), "tiles")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    address, stride, num_rows = function.args
    amx.emit_configure(builder, [amx.TileSize(num_rows, 64)] * 8)
    amx.emit_zero(builder, 3)
    amx.emit_load_tile(builder, 4, address, stride)
    amx.emit_load_tile(builder, 7, address, ir.Constant(number, 64))
    amx.emit_add_product(builder, 3, 4, 7)
    amx.emit_store_tile(builder, 3, address, stride)
    amx.emit_release(builder)
    builder.ret_void()
    llvmlite.binding.initialize_native_target()
    llvmlite.binding.initialize_native_asmprinter()
    target = llvmlite.binding.Target.from_triple("x86_64-unknown-linux-gnu")
    compiler = target.create_target_machine(features="+amx-tile,+amx-int8")
    (tmp_path / "tiles.o").write_bytes(compiler.emit_object(llvmlite.binding.parse_assembly(str(module))))
    command = ["objdump", "-d", "--no-show-raw-insn", str(tmp_path / "tiles.o")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    code = [line.split("\t")[1].split() for line in listing.splitlines() if "\t" in line]
    found = [parts for parts in code if "tmm" in parts[-1] or parts[0] in ("ldtilecfg", "tilerelease")]
    assert [parts[0] for parts in found] == [
        *("ldtilecfg", "tilezero", "tileloadd", "tileloadd", "tdpbssd", "tilestored", "tilerelease")
    ]
    assert [parts[-1] for parts in found[1:6]] == [
        *("%tmm3", "(%rdi,%rsi,1),%tmm4", "(%rdi,%rax,1),%tmm7", "%tmm7,%tmm4,%tmm3", "%tmm3,(%rdi,%rsi,1)")
    ]


def test_there_are_eight_tiles() -> None:
    builder = ir.IRBuilder()
    with pytest.raises(ValueError, match=r"tile 8; there are 0 \.\.\. 7"):
        amx.emit_zero(builder, 8)


@emulated
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", "None True"),
        ("illegal", "a first product was ended by signal 4 (Illegal instruction) True"),
        ("wrong", "a first product failed: its numbers are wrong True"),
        ("refuse", "a first product failed: Linux refuses the permission to use tiles: Invalid argument False"),
    ],
)
def test_a_processor_that_fails_is_found_out_by_a_child_process(machine: AmxMachine, fault: str, found: str) -> None:
    assert machine.output_of(PROBE.format(timeout_s=100), AMX_EMULATOR_FAULT=fault) == found


@emulated
def test_a_product_without_an_end_is_not_waited_for(machine: AmxMachine) -> None:
    found = machine.output_of(PROBE.format(timeout_s=0.5), AMX_EMULATOR_FAULT="hang")
    assert found == "a first product had no end within 0.5 s False"


@emulated
def test_what_was_found_out_is_kept_until_the_machine_starts_again(machine: AmxMachine, tmp_path: Path) -> None:
    def chosen(fault: str) -> str:
        return machine.output_of(CHOSEN, AMX_EMULATOR_FAULT=fault, WEIR_CACHE=str(tmp_path))

    bad = "avx512-vnni a first product was ended by signal 4 (Illegal instruction)"
    assert chosen("illegal") == bad
    assert chosen("") == bad, "kept"
    kept = tmp_path / "kernels" / "amx.json"
    found = json.loads(kept.read_text())
    for content in (json.dumps(found | {"machine": "before it was started"}), "[]", "{"):
        kept.write_text(content)
        assert chosen("") == "amx None", content
        assert json.loads(kept.read_text()) == {"machine": found["machine"], "problem": None}
    assert chosen("refuse").startswith("avx512-vnni Linux refuses"), "of this process, whatever was kept"


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("kill -9 $$", "a first product was ended by signal 9 (Killed)"),
        ("echo no module >&2; exit 1", "a first product failed: no module"),
        (None, "a first product could not be tried: [Errno 2] No such file or directory"),
    ],
)
def test_what_says_nothing_about_the_processor_is_not_kept(
    machine: AmxMachine, tmp_path: Path, program: str | None, problem: str
) -> None:
    child = tmp_path / "child"
    if program is not None:
        child.write_text(f"#!/bin/sh\n{program}\n")
        child.chmod(0o700)
    assert machine.output_of(BAD_CHILD, str(child), WEIR_CACHE=str(tmp_path)).startswith(problem)
    assert not (tmp_path / "kernels" / "amx.json").exists()
    assert machine.output_of(CHOSEN, WEIR_CACHE=str(tmp_path)) == "amx None"


def test_of_several_processes_one_tries_and_the_others_take_its_answer(machine: AmxMachine, tmp_path: Path) -> None:
    assert machine.output_of(WAITING, WEIR_CACHE=str(tmp_path)) == "found by the other"


def test_where_nothing_can_be_kept_it_is_tried_all_the_same(machine: AmxMachine, tmp_path: Path) -> None:
    assert machine.output_of(NO_BOOT_ID, WEIR_CACHE=str(tmp_path)) == "None"
    assert not (tmp_path / "kernels" / "amx.json").exists()
    (tmp_path / "kernels").write_text("no folder")
    assert machine.output_of(CHOSEN, WEIR_CACHE=str(tmp_path)) == "amx None"


@emulated
def test_a_processor_that_fails_is_refused_by_name_and_doctor_says_why(machine: AmxMachine, tmp_path: Path) -> None:
    environment = {"AMX_EMULATOR_FAULT": "illegal", "WEIR_CACHE": str(tmp_path)}
    refused = machine.python("-c", CHOSEN, WEIR_CPU_KERNELS="amx", **environment)
    assert "WEIR_CPU_KERNELS is 'amx'; this processor runs portable, avx2, avx-vnni, avx512-vnni." in refused.stderr
    doctor = "from weir.cli.main import main; main()"
    found = {
        one["what"]: one for one in json.loads(machine.python("-c", doctor, "doctor", "--json", **environment).stdout)
    }
    assert "int8, avx512-vnni kernels" in found["device cpu"]["found"]
    assert found["AMX"]["found"] == "not used: a first product was ended by signal 4 (Illegal instruction)"
    found = {one["what"]: one for one in json.loads(machine.python("-c", doctor, "doctor", "--json").stdout)}
    assert "int8, amx kernels" in found["device cpu"]["found"]
    assert "AMX" not in found


@pytest.mark.skipif(HAS_AMX, reason="this processor has AMX")
def test_a_processor_without_it_refuses_it_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_CPU_KERNELS", "amx")
    assert InstructionSet.AMX not in available_instruction_sets()
    with pytest.raises(ValueError, match=r"WEIR_CPU_KERNELS is 'amx'; this processor runs portable.* Leave it out"):
        instruction_set()


@emulated
def test_the_emulator_ends_at_what_it_does_not_know(machine: AmxMachine) -> None:
    ran = machine.python("-c", UNKNOWN)
    assert (ran.returncode, ran.stderr) == (
        97,
        "AMX emulator: an instruction that it does not know: c4 e2 6a 5c c1 c3 00 00 00 00 00 00\n",
    )
