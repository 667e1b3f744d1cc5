"""Without extras Weir has no torch, no compiler, no plots: all but workers works, and says what it lacks."""

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from tests.guard.sources import imports_of, is_within, modules

from weir.runtime.extras import DISTRIBUTION, PACKAGES

ROOT = Path(__file__).parents[2]
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "psycopg": "psycopg[binary]"}

# None in sys.modules: not installed, for `import` and for `importlib.util.find_spec`.
_PLAIN = """
import sys
for name in ("torch", "triton", "numba", "llvmlite", "matplotlib", "sklearn", "scipy", "joblib", "psycopg", "redis",
             "cryptography"):
    sys.modules[name] = None
"""
_EVERY_HELP = """
import typer.main
from typer.testing import CliRunner
from weir.cli.app import app

def paths(command, path):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from paths(child, [*path, name])

every = list(paths(typer.main.get_command(app), []))
for path in every:
    shown = CliRunner().invoke(app, [*path, "--help"])
    assert shown.exit_code == 0 and "Usage:" in shown.output, (path, shown.output, shown.exception)
print(len(every))
"""
_EVERY_MODULE = """
import importlib, pkgutil
names = ["weir.cli.app"]
for root in ("weir_gateway", "weir_scheduler", "weir_transfer", "weir_prefill", "weir_decode", "weir.client",
             "weir.scheduling", "weir.engine", "weir.worker", "weir.policy", "weir.kv", "weir.bus", "weir.rpc",
             "weir.cli", "weir.sim", "weir.bench"):
    package = importlib.import_module(root)
    names += [module.name for module in pkgutil.walk_packages(package.__path__, root + ".")]
needs_extra = {
    "weir.kv.tiers.valkey_client", "weir.kv.tiers.valkey_store", "weir.sim.results.plots", "weir.bench.step",
    "weir.bench.step_split", "weir.bench.serving.curves",
}
for name in set(names) - needs_extra:
    importlib.import_module(name)
print(len(names))
"""


def run_plain(code: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", _PLAIN + code], cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )


def run_weir(cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    code = f"from weir.cli.main import main\nsys.argv = {['weir', *arguments]!r}\nmain()"
    return run_plain(code, cwd)


def test_the_command_line_waits_for_no_numpy(tmp_path: Path) -> None:
    shown = run_plain("import weir.cli.app; print('numpy' in sys.modules)", tmp_path)
    assert (shown.returncode, shown.stdout) == (0, "False\n"), shown.stderr


def test_every_command_shows_its_help(tmp_path: Path) -> None:
    done = run_plain(_EVERY_HELP, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 25


def test_services_clients_and_commands_import_nothing_of_an_extra(tmp_path: Path) -> None:
    done = run_plain(_EVERY_MODULE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200


@pytest.mark.parametrize(
    ("arguments", "what", "missing", "extra"),
    [
        (["up"], "weir up", "torch and numba", "worker"),
        (["bench", "step"], "weir bench step", "torch and numba", "worker"),
        (["bench", "quality", "--text", "x"], "weir bench quality", "torch and numba", "worker"),
        (["bench", "batching", "--lengths", "x"], "weir bench batching", "torch and numba", "worker"),
        (["certs", "ca", "x"], "weir certs", "cryptography", "certs"),
        (["profile"], "weir profile without --live", "torch and numba", "worker"),
        (["simulate", "--rate", "1", "--plots", "x"], "weir simulate --plots", "matplotlib", "plots"),
        (["bench", "serve", "--sweep-request-rates", "1"], "weir bench serve with a sweep", "matplotlib", "plots"),
        (["train-predictor", "x", "--out", "y"], "weir train-predictor", "torch and sklearn and scipy", "training"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_needs_an_extra_says_in_one_line_which_and_how_to_get_it(
    tmp_path: Path, arguments: list[str], what: str, missing: str, extra: str
) -> None:
    done = run_weir(tmp_path, *arguments)
    line = f"error: {what} needs {missing}, which this install lacks: pip install 'weir-llm[{extra}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def test_a_worker_ends_with_that_line_and_as_after_a_wrong_setting(tmp_path: Path) -> None:
    """No supervisor starts it again: another start would meet the same."""
    code = """
    from weir_prefill.__main__ import main
    sys.argv = ["weir_prefill", "--listen", "127.0.0.1:0", "--log-format", "text"]
    sys.exit(main())
    """
    done = run_plain(textwrap.dedent(code), tmp_path)
    assert done.returncode == 2, done.stderr
    assert "could not start: a worker needs torch and numba, which this install lacks: " in done.stderr
    assert "pip install 'weir-llm[worker]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gateway_with_batches_in_postgresql_ends_with_such_a_line(tmp_path: Path) -> None:
    code = """
    from weir_gateway.__main__ import main
    sys.argv = ["weir_gateway", "--listen", "127.0.0.1:0", "--log-format", "text", "--batch-store", "postgresql://h/d"]
    sys.exit(main())
    """
    done = run_plain(textwrap.dedent(code), tmp_path)
    assert done.returncode == 2, done.stderr
    assert "batch_store on PostgreSQL needs psycopg, which this install lacks: " in done.stderr
    assert "pip install 'weir-llm[postgres]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_doctor_takes_note_of_what_only_workers_need(tmp_path: Path) -> None:
    done = run_weir(tmp_path, "doctor")
    assert "note    device cpu" in done.stdout, done.stderr
    assert "pip install 'weir-llm[worker]'" in done.stdout
    assert "Traceback" not in done.stderr


def test_what_is_simulated_and_measured_without_a_model_works(tmp_path: Path) -> None:
    simulated = run_weir(tmp_path, "simulate", "--rate", "5", "--num-requests", "20", "--local", "1", "--json")
    assert simulated.returncode == 0, simulated.stderr
    decided = run_weir(
        tmp_path, "bench", "scheduler", "--policy", "fcfs", "--queued", "10", "--pairs", "1", "--num-decisions", "100"
    )
    assert decided.returncode == 0, decided.stderr


def test_each_extra_of_the_distribution_is_what_its_name_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    names = {
        extra: {re.split(r"[ ;<>=]", line)[0] for line in lines}
        for extra, lines in project["optional-dependencies"].items()
    }
    assert names.pop("dev") > {f"{DISTRIBUTION}[certs,plots,postgres,training,valkey,worker]"}
    asked = {extra: {_DISTRIBUTIONS.get(name, name) for name in packages} for extra, packages in PACKAGES.items()}
    asked["worker"] |= {"triton", "nvidia-ml-py"}  # asked for by device, not by extra
    assert names == asked


def test_where_the_scheduling_core_is_compiled_is_what_its_annotations_are_of() -> None:
    """No package of the environment that a wheel is built in comes from anywhere else."""
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    there = {re.split("[<>=]", name)[0] for name in hook["custom"]["dependencies"]}
    imported = {
        one.module.partition(".")[0]
        for module in modules()
        if is_within(module, ("weir.scheduling",))
        for one in imports_of(module)
    }
    assert imported - sys.stdlib_module_names - {"weir"} <= there
