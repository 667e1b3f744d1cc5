"""The wheel whose scheduling core is compiled: it decides as its sources do."""

import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.e2e.wheels import ROOT, build_wheel

pytest.importorskip("hatchling", reason="builds the wheel; `make setup-dev` installs it")
pytestmark = pytest.mark.timeout(1800)  # whichever is the first one compiles

_ORIGINS = """
import importlib, pkgutil, weir.scheduling
for module in pkgutil.walk_packages(weir.scheduling.__path__, "weir.scheduling."):
    if not module.ispkg:
        print(module.name, importlib.import_module(module.name).__file__)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages. Not optimized: it is made in 33 s instead of 57."""
    folder = tmp_path_factory.mktemp("compiled")
    wheel = build_wheel(folder, {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "1", "MYPYC_OPT_LEVEL": "0"})
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "packages")
    return folder / "packages"


def run_with(packages: Path, *arguments: str) -> str:
    """What Python prints with these packages before all others."""
    command = [sys.executable, *arguments]
    environ = os.environ | {"PYTHONPATH": str(packages)}
    done = subprocess.run(command, cwd=packages, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_conversations(path: Path) -> None:
    """Sixty of up to five turns, each turn's prompt the one before and more, as Mooncake's traces have them."""
    rng, num_blocks, lines = random.Random(1), 0, []
    for _ in range(60):
        start_ms, hash_ids = rng.randrange(3000), [rng.randrange(4)]
        for _ in range(rng.randint(1, 5)):
            hash_ids = [*hash_ids, *range(100 + num_blocks, 100 + num_blocks + rng.randint(1, 4))]
            num_blocks += 4
            num_tokens = 512 * len(hash_ids) - rng.randrange(500)
            line = {"timestamp": start_ms, "input_length": num_tokens, "output_length": rng.randint(1, 300)}
            lines.append(line | {"hash_ids": hash_ids})
            start_ms += rng.randrange(100, 800)
    lines.sort(key=lambda line: line["timestamp"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_all_of_it_is_compiled_but_what_reads_limits(compiled: Path) -> None:
    origins = dict(line.split() for line in run_with(compiled, "-c", _ORIGINS).splitlines())
    assert len(origins) > 25
    interpreted = {name.removeprefix("weir.scheduling.") for name, origin in origins.items() if origin.endswith(".py")}
    assert interpreted == {"limits", "limits_file", "worker_limits"}
    assert all(Path(origin).is_relative_to(compiled) for origin in origins.values())


@pytest.mark.parametrize("policy", ["fcfs", "srtf"])
def test_a_simulated_load_ends_as_by_the_sources(compiled: Path, tmp_path: Path, policy: str) -> None:
    """Hosts exchange pages, arenas are small and a worker dies: every part of a decision has something to decide."""
    trace = tmp_path / "trace.jsonl"
    write_conversations(trace)
    simulate = ["-m", "weir.cli.main", "simulate", str(trace), "--host", "2+0", "--host", "1+2", "--host-gbit", "100"]
    simulate += ["--num-pages", "2500", "--policy", policy, "--fail", "prefill-0@1-3", "--json"]
    results = [run_with(packages, *simulate) for packages in (compiled, ROOT / "shared")]
    assert results[0] == results[1]
    counters = json.loads(results[0])["counters"]
    assert counters["core_ended_finished_total"] > 100
    assert counters["core_placed_split_cached_total"] > 50
    assert counters["core_placed_crossing_total"] > 10


def test_the_tests_of_scheduling_pass_on_it(compiled: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-o", f"pythonpath={compiled} {ROOT}", "-o", "timeout=1800"]
    command = [sys.executable, "-m", "pytest", *options, "tests/unit/scheduler"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
