"""`weir pull`, `weir models` and `weir up` as a shell sees them, with the hub's own variables."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.unit.hub.hub_server import LocalHub, sha256
from tests.unit.model.tiny import GREEDY, LogitsProbe, chunk, poisoned_pages

from weir.engine.plan import ChunkPlan, StepPlan
from weir.model.cpu.core_share import FixedShare
from weir.model.files.source import resolve_model
from weir.model.load import load_model
from weir.testing.stack import wait_until


@pytest.fixture
def environ(server: LocalHub, tmp_path: Path, gguf_bytes: bytes) -> dict[str, str]:
    server.repositories["org/tiny"] = {"tiny.gguf": gguf_bytes}
    unset = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "WEIR_", "XDG_"))}
    home = {"HF_HOME": str(tmp_path / "hf"), "WEIR_CACHE": str(tmp_path / "weir"), "WEIR_RUNTIME_DIR": str(tmp_path)}
    return unset | home | {"HF_ENDPOINT": server.endpoint, "COLUMNS": "400"}


# Where SIGINT is ignored, as in a job in the background, a child ignores it too.
WEIR = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from weir.cli.main import main
main()
"""


def start(environ: Mapping[str, str], *arguments: str, program: str = WEIR) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def weir(environ: Mapping[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    with start(environ, *arguments) as process:
        stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def test_what_is_pulled_gives_a_worker_its_next_token(
    environ: dict[str, str], gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = weir(environ, "pull", "org/tiny")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.is_relative_to(tmp_path / "hf/hub/models--org--tiny/snapshots")
    assert "org/tiny: 0.3 MB in 1 file; commit" in done.stderr
    assert "download 100% of 0.3 MB" in done.stderr
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    source = resolve_model("org/tiny")
    assert (source.name, source.path) == ("org/tiny", path)
    weights = load_model(source, "fp32", FixedShare(1), tmp_path / "weir")
    runner = weights.runner_over(poisoned_pages(4, weights.page_geometry.page_bytes))
    step = runner.run(StepPlan(0, (ChunkPlan(0, 0, (1, 2, 3), (1,), GREEDY),)))
    original = tmp_path / "original.gguf"
    original.write_bytes(gguf_bytes)
    logits = LogitsProbe(resolve_model(str(original))).run(chunk(0, [1, 2, 3], 0, 3, (1,)))[0]
    assert dict(step.token_ids) == {0: int(torch.argmax(logits))}


def test_an_interrupted_pull_says_what_is_kept_and_goes_on_from_there(
    environ: dict[str, str], server: LocalHub, gguf_bytes: bytes, tmp_path: Path
) -> None:
    server.behaviour.pause_s = 0.2
    partial = tmp_path / f"hf/hub/models--org--tiny/blobs/{sha256(gguf_bytes)}.weir.incomplete"
    with start(environ, "pull", "org/tiny") as process:
        wait_until(lambda: partial.is_file() and partial.stat().st_size > 0, timeout_s=30, what="some of the file came")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "org/tiny: interrupted; what has come is kept, and the same command goes on from there" in stderr
    assert "Traceback" not in stderr
    kept = partial.stat().st_size
    assert 0 < kept < len(gguf_bytes)
    listed = weir(environ, "models")
    assert "org/tiny" in listed.stdout
    assert "only partly here" in listed.stdout
    server.behaviour.pause_s = 0.0
    done = weir(environ, "pull", "org/tiny")
    assert done.returncode == 0, done.stderr
    assert server.downloads()[-1].range == f"bytes={kept}-"
    assert not partial.exists()


def test_a_disk_that_takes_all_but_the_last_byte_gives_no_file(
    environ: dict[str, str], server: LocalHub, gguf_bytes: bytes
) -> None:
    limited = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({len(gguf_bytes) - 1}, -1))\n{WEIR}"
    with start(environ, "pull", "org/tiny", program=limited) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "(File too large); make room or set HF_HOME to another folder. What has come is kept" in stderr
    done = weir(environ, "pull", "org/tiny")
    assert Path(done.stdout.strip()).read_bytes() == gguf_bytes
    assert server.downloads()[-1].range == f"bytes={len(gguf_bytes) - 1}-"


def test_models_lists_what_is_here_for_people_and_for_scripts(
    environ: dict[str, str], server: LocalHub, gguf_bytes: bytes
) -> None:
    weir(environ, "pull", "org/tiny:tiny.gguf")
    shown = weir(environ, "models")
    assert shown.returncode == 0, shown.stderr
    assert f"org/tiny:tiny.gguf     0.3 MB  {server.commit('org/tiny')[:12]}  yes" in shown.stdout
    (_, model) = json.loads(weir(environ, "models", "--json").stdout)
    assert (model["name"], model["size_bytes"]) == ("org/tiny:tiny.gguf", len(gguf_bytes))
    assert (model["digest"], model["obstacle"]) == (sha256(gguf_bytes), "")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/none", "error: --model: org/none: http://127.0.0.1:{port} has no such repository"),
        ("org/tiny:none.gguf", "error: --model: file 'none.gguf': org/tiny has tiny.gguf"),
        ("org/../tiny", "error: --model: no model 'org/../tiny': neither a known name"),
        ("org/ti ny", "error: --model: no model 'org/ti ny': repository 'org/ti ny': not ORG/NAME"),
        (
            "models/tiny.gguf",
            "error: --model: no model 'models/tiny.gguf': repository 'models/tiny.gguf': no such file",
        ),
    ],
)
def test_up_says_in_a_line_why_it_cannot_have_a_model(
    environ: dict[str, str], server: LocalHub, model: str, expected: str
) -> None:
    done = weir(environ, "up", "--model", model)
    assert done.returncode == 1
    assert expected.format(port=server.hub_port) in done.stderr
    assert "Traceback" not in done.stderr


def test_offline_a_pull_does_not_say_that_it_asks(environ: dict[str, str]) -> None:
    assert "asking http" in weir(environ, "pull", "org/tiny").stderr
    offline = weir(environ | {"HF_HUB_OFFLINE": "1"}, "pull", "org/tiny")
    assert (offline.returncode, offline.stderr) == (0, "")


def test_offline_up_asks_nobody(environ: dict[str, str], server: LocalHub) -> None:
    done = weir(environ | {"HF_HUB_OFFLINE": "1"}, "up", "--model", "org/tiny")
    assert done.returncode == 1
    assert "is not in the hub's cache" in done.stderr
    assert "run `weir pull org/tiny` once HF_HUB_OFFLINE is not set" in done.stderr
    assert server.asked == []
