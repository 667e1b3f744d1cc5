"""`weir up`, `down`, `status` and `serve` as a user's shell sees them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weir.cli.app import app
from weir.core.process import own_identity
from weir.runtime.change_log import Change, ChangeLog
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.processes import tag, try_identify
from weir.runtime.stack.state import ProcessState, StackState, read_boot_id, write_state
from weir.testing.stack import wait_until


@dataclass(frozen=True)
class Shown:
    """What a command left on the terminal."""

    returncode: int
    stdout: str
    stderr: str


def weir(runtime_dir: Path, *arguments: str, **environ: str) -> Shown:
    """Runs a command in this process, with no settings of the machine it runs on."""
    unset = {key: None for key in os.environ if key.startswith("WEIR_")}
    env: dict[str, str | None] = {**unset, "WEIR_RUNTIME_DIR": str(runtime_dir), **environ}
    result = CliRunner().invoke(app, arguments, env=env, prog_name="weir")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Shown(result.exit_code, result.stdout, result.stderr)


def weir_process(*arguments: str) -> Shown:
    """Runs a command in a process of its own."""
    command = [sys.executable, "-m", "weir.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return Shown(done.returncode, done.stdout, done.stderr)


def bystander(folder: Path) -> "subprocess.Popen[bytes]":
    """A process that carries the tag of the instance in `folder`, whose supervisor is gone."""
    command = [sys.executable, "-S", "-E", "-c", "import time; time.sleep(60)"]
    return subprocess.Popen(command, env=tag(folder, replace(own_identity(), start_ticks=1)))


def orphaned_state(instance: str, process: "subprocess.Popen[bytes]") -> StackState:
    """What a killed supervisor leaves: itself gone, one child alive."""
    return StackState(
        instance=instance,
        boot_id=read_boot_id(),
        supervisor=replace(own_identity(), start_ticks=1),
        phase="ready",
        started_at=0.0,
        stop_limit_s=1.0,
        endpoints={"gRPC": "127.0.0.1:1"},
        processes=(ProcessState("nats", "nats", "ready", try_identify(process.pid), 2, 0.0, "127.0.0.1:2", "/log"),),
    )


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The instance `a` in `tmp_path`, orphaned, with one process."""
    paths = InstancePaths(tmp_path / "a")
    paths.make()
    process = bystander(paths.folder)
    write_state(paths.state_file, orphaned_state("a", process))
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (("--decode", "0"), {}, "decode 0: must be in [1, 64] (from --decode)"),
        (("--http-port", "70000"), {}, "http_port 70000: must be in [1, 65535] (from --http-port)"),
        (("--http-port", "50051"), {}, "http_port 50051: is also the grpc_port; they must differ (from --http-port)"),
        (("--precision", "fp7"), {}, "--precision 'fp7': must be one of auto, int8, fp32"),
        (("--exact", "--precision", "fp32"), {}, "exact: precision fp32 on device cpu is computed by PyTorch"),
        (("--precision", "fp32"), {"WEIR_EXACT": "yes"}, "exact: precision fp32 on device cpu"),
        ((), {"WEIR_EXACT": "perhaps"}, "WEIR_EXACT='perhaps': must be true or false"),
        (
            ("--precision", "fp8"),
            {},
            "precision fp8: device cpu computes in int8 or fp32; auto is int8",
        ),
        (("--nats", "here:4222"), {}, "nats 'here:4222': must start with nats:// or tls:// (from --nats)"),
        (("--otlp-endpoint", "x:1"), {}, "otlp_endpoint 'x:1': must start with http:// or https:// (from --otlp"),
        (("--policy", "nope"), {}, "--policy: policy 'nope': must be one of fcfs, "),
        (("--policy", "ltr:starvation=perhaps"), {}, "--policy: policy ltr: starvation"),
        (("--limits-file", "none.toml"), {}, "limits file none.toml: No such file or directory"),
        ((), {"WEIR_DECODE": "two"}, "WEIR_DECODE='two': must be a whole number"),
        (("--instance", "a/b"), {}, "instance 'a/b': use 1 to 40 characters of A-Z a-z 0-9 _ -"),
        (("--config", "none.toml"), {}, "config file none.toml: "),
    ],
)
def test_up_names_a_bad_setting_with_its_source_and_starts_nothing(
    tmp_path: Path, arguments: tuple[str, ...], environ: dict[str, str], message: str
) -> None:
    shown = weir(tmp_path, "up", *arguments, **environ)
    assert shown.returncode == 2
    assert shown.stderr.startswith(f"error: {message}"), shown.stderr
    assert list(tmp_path.iterdir()) == []


def test_up_reads_its_own_table_and_leaves_those_of_services_alone(tmp_path: Path) -> None:
    config = tmp_path / "weir.toml"
    config.write_text('grace_s = 1\nnats_url = "nats://x:1"\n[scheduler]\nlanes = []\n[up]\nprefill = 99\n')
    shown = weir(tmp_path, "up", "--config", str(config))
    assert shown.returncode == 2
    assert shown.stderr.startswith(f"error: prefill 99: must be in [0, 64] (from {config}: [up] prefill)")


def test_up_names_the_key_of_a_limits_file_that_is_wrong(tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[lanes.interactive]\nmax_queud = 3\n")
    shown = weir(tmp_path / "run", "up", "--limits-file", str(limits))
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"error: limits file {limits}: lanes.interactive.max_queud: unknown; known are")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("url", ["nats://127.0.0.1:1", "nats://127.0.0.1:many"])
def test_up_does_not_begin_without_the_nats_server_that_it_is_to_use(tmp_path: Path, url: str) -> None:
    shown = weir(tmp_path / "run", "up", "--nats", url)
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"error: --nats {url}: no server answers there (")
    assert "or leave --nats out" in shown.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [(), ("--detach",)], ids=["here", "detached"])
def test_up_names_a_runtime_folder_that_cannot_be_made(flags: tuple[str, ...], tmp_path: Path) -> None:
    model, file = tmp_path / "m.gguf", tmp_path / "file"
    model.write_bytes(b"")
    file.write_bytes(b"")
    shown = weir(file / "run", "up", "--model", str(model), *flags)
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"error: {file}/run cannot be made (Not a directory); set WEIR_RUNTIME_DIR")


def test_up_says_where_exact_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    shown = weir(file / "run", "up", "--exact", "--load", "dummy", "--model-shape", "tiny")
    assert shown.stderr.startswith("--exact changes nothing: int8 on a CPU is exact in any case\nerror: ")


def test_up_names_which_port_is_busy_before_anything_starts(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        shown = weir(tmp_path, "up", "--grpc-port", port, "--model", str(model))
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"error: --grpc-port {port}: in use on 127.0.0.1")
    assert list((tmp_path / f"weir-{port}" / "logs").iterdir()) == []


def test_a_detached_stack_that_is_slow_to_end_after_ctrl_c_is_a_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, is_deaf = tmp_path / "m.gguf", tmp_path / "deaf"
    model.write_bytes(b"")
    deaf = "import os, signal, sys, time; from pathlib import Path; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    deaf += "Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr("weir.cli.stack.up.detached_command", lambda _: [sys.executable, "-c", deaf, str(is_deaf)])
    monkeypatch.setattr("weir.cli.stack.up._STOP_S", 0.2)

    started: list[subprocess.Popen[bytes]] = []

    def press_ctrl_c(_: object, supervisor: "subprocess.Popen[bytes]") -> None:
        started.append(supervisor)
        wait_until(lambda: is_deaf.exists() and is_deaf.read_text() != "", timeout_s=10, what="it is deaf")
        raise KeyboardInterrupt

    monkeypatch.setattr("weir.cli.stack.up._follow", press_ctrl_c)
    try:
        shown = weir(tmp_path / "run", "up", "--detach", "--model", str(model), "--instance", "slow")
    finally:
        for supervisor in started:
            supervisor.kill()
            supervisor.wait()
    assert shown.returncode == 130
    assert f"slow is still stopping (process {is_deaf.read_text()}); `weir down --instance slow` ends it" in flat(shown)


def flat(shown: Shown) -> str:
    """As lines of any width would show it."""
    return " ".join(shown.stderr.split())


def test_up_refuses_a_model_that_is_nowhere(tmp_path: Path) -> None:
    shown = weir(tmp_path, "up", "--model", "no-such-model")
    assert shown.returncode == 1
    assert "no model 'no-such-model'" in shown.stderr
    assert "weir pull smollm2-135m" in shown.stderr


def test_up_refuses_a_folder_whose_sockets_would_not_work(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"")
    shown = weir(tmp_path / ("d" * 100), "up", "--model", str(model), "--grpc-port", "1", "--http-port", "2")
    assert shown.returncode == 1
    assert "set WEIR_RUNTIME_DIR to a shorter folder" in shown.stderr


def test_status_of_nothing_is_3(tmp_path: Path) -> None:
    shown = weir(tmp_path, "status")
    assert (shown.returncode, shown.stderr) == (3, "weir-50051 is not running\n")
    as_json = weir(tmp_path, "status", "--json", "--grpc-port", "7")
    assert as_json.returncode == 3
    assert json.loads(as_json.stdout) == {"instance": "weir-7", "state": "not running", "processes": []}


def test_status_finds_the_only_instance_and_shows_that_nobody_looks_after_it(
    tmp_path: Path, orphan: "subprocess.Popen[bytes]"
) -> None:
    shown = weir(tmp_path, "status")
    assert shown.returncode == 1
    assert shown.stdout.startswith("a: orphaned")
    assert "its supervisor was killed" in shown.stderr
    report = json.loads(weir(tmp_path, "status", "--json").stdout)
    assert report["supervisor_pid"] is None
    assert [(p["name"], p["pid"], p["state"], p["num_restarts"]) for p in report["processes"]] == [
        ("nats", orphan.pid, "ready", 2)
    ]


def test_a_process_whose_death_its_supervisor_has_not_seen_yet_is_not_ready(
    tmp_path: Path, orphan: "subprocess.Popen[bytes]"
) -> None:
    supervised = replace(orphaned_state("a", orphan), supervisor=own_identity())
    write_state(InstancePaths(tmp_path / "a").state_file, supervised)
    assert weir(tmp_path, "status").returncode == 0
    orphan.kill()
    orphan.wait()
    shown = weir(tmp_path, "status", "--json")
    assert shown.returncode == 1
    assert [(p["pid"], p["state"]) for p in json.loads(shown.stdout)["processes"]] == [(None, "restarting")]


def test_down_ends_an_orphaned_instance_and_is_content_when_there_is_none(
    tmp_path: Path, orphan: "subprocess.Popen[bytes]"
) -> None:
    ended = weir(tmp_path, "down")
    assert ended.returncode == 0
    assert f"ended processes that had no supervisor: {orphan.pid}" in ended.stderr
    assert "a has ended" in ended.stderr
    assert orphan.wait(5) == -signal.SIGTERM
    again = weir(tmp_path, "down", "--instance", "a")
    assert (again.returncode, again.stderr) == (0, "a was not running\n")


def test_a_stack_whose_folder_was_deleted_is_named_by_status_and_ended_by_down(
    tmp_path: Path, orphan: "subprocess.Popen[bytes]"
) -> None:
    shutil.rmtree(tmp_path / "a")
    shown = weir(tmp_path, "status")
    assert shown.returncode == 1
    assert f"a: processes of it run ({orphan.pid}), but {tmp_path}/a/state.json is gone" in shown.stderr
    assert "`weir down --instance a` ends them" in shown.stderr
    ended = weir(tmp_path, "down")
    assert ended.returncode == 0
    assert "a has ended" in ended.stderr
    assert orphan.wait(5) == -signal.SIGTERM


def test_status_and_down_ask_which_of_several(tmp_path: Path, orphan: "subprocess.Popen[bytes]") -> None:
    other = InstancePaths(tmp_path / "b")
    other.make()
    write_state(other.state_file, orphaned_state("b", orphan))
    for command in ("status", "down"):
        shown = weir(tmp_path, command)
        assert shown.returncode == 1
        assert "several instances run: a, b; say which with --instance" in shown.stderr
    assert orphan.poll() is None


def test_serve_becomes_the_service_and_hands_its_flags_on() -> None:
    shown = weir_process("serve", "scheduler", "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: python -m weir_scheduler")
    bad = weir_process("serve", "scheduler", "--grace-s", "x")
    assert (bad.returncode, bad.stderr) == (2, "weir_scheduler: error: --grace-s 'x': must be a number\n")
    assert weir_process("serve", "cook").returncode == 2


@pytest.mark.parametrize("command", ["status", "down"])
def test_what_cannot_be_a_name_is_refused(tmp_path: Path, command: str) -> None:
    shown = weir(tmp_path, command, "--instance", "../elsewhere")
    assert shown.returncode == 1
    assert shown.stderr.startswith("error: instance '../elsewhere': use 1 to 40 characters")


def test_the_command_line_does_not_load_torch() -> None:
    code = "import sys, weir.cli.app; sys.exit(any(name.partition('.')[0] == 'torch' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "command",
    ["", "up", "down", "status", "serve", "generate", "chat", "pull", "models", "doctor", "bench", "bench step"],
)
def test_every_command_has_a_help_text(tmp_path: Path, command: str) -> None:
    shown = weir(tmp_path, *command.split(), "--help")
    assert shown.returncode == 0
    assert "Usage: weir" in shown.stdout


def test_changes_of_operators_are_printed_of_an_instance_that_has_ended_too(tmp_path: Path) -> None:
    paths = InstancePaths(tmp_path / "a")
    paths.make()
    seconds = iter((2.0, 1.0))
    for process in ("scheduler-0", "supervisor"):
        log = ChangeLog(paths.changes_file(process), process, now_s=lambda: next(seconds))
        log.write(Change("here", "set policy", "policy", "done", "fcfs", "srtf"))
    shown = weir(tmp_path, "audit", "--changes", "--instance", "a")
    assert shown.returncode == 0
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(line["process"], line["object"]) for line in lines] == [
        ("supervisor", "policy"),
        ("scheduler-0", "policy"),
    ]
    out = tmp_path / "changes.jsonl"
    assert weir(tmp_path, "audit", "--changes", "--instance", "a", "--out", str(out)).returncode == 0
    assert out.read_text() == shown.stdout
    assert out.stat().st_mode & 0o777 == 0o600
    refused = weir(tmp_path, "audit", "--changes", "--nats-url", "nats://127.0.0.1:1")
    assert (refused.returncode, "leave out --nats-url" in refused.stderr) == (2, True)
