"""A stack that is started with a model of the hub gets it first, and asks the hub for nothing afterwards."""

from pathlib import Path

import httpx
import pytest
from tests.unit.hub.hub_server import running_hub

from benchmarks.random_gguf import write_random_gguf
from weir.core.roles import WORKER_ROLES
from weir.model.files.dummy import shape_named
from weir.testing.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

NAME = "org/tiny:tiny.gguf"


def test_a_model_of_the_hub_is_fetched_once_and_served_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_random_gguf(shape_named("tiny"), path)
    with running_hub() as server:
        server.repositories["org/tiny"] = {"tiny.gguf": path.read_bytes(), "other.gguf": b"not asked for"}
        environ = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        flags = ("--model", NAME, "--arena-bytes", str(64 << 20))
        with Stack(tmp_path / "run", flags=flags, environ=environ) as stack:
            num_asked = len(server.asked)
            asked = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "temperature": 0}
            answer = httpx.post(f"{stack.http_url}/v1/completions", json=asked, timeout=60).json()
            described = httpx.get(f"{stack.http_url}/v1/models/{NAME}").json()
            # whoever pulls meanwhile changes nothing for a worker that is started again
            server.repositories["org/tiny"]["tiny.gguf"] += bytes(32)
            pulled = stack.weir("pull", NAME)
            workers = [process.name for process in stack.processes() if process.role in WORKER_ROLES]
            restarted = stack.weir("restart", "--rolling", *workers, "--instance", stack.instance, timeout_s=120)
            again = httpx.post(f"{stack.http_url}/v1/completions", json=asked, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert (answer["model"], described["id"]) == (NAME, NAME)
    assert len([one for one in server.asked[:num_asked] if one.at == "store"]) == 1
    assert pulled.returncode == 0, pulled.stderr
    assert restarted.returncode == 0, restarted.stderr
    assert again["choices"] == answer["choices"]
