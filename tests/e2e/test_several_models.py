"""Several models in one stack: each request to its own, lanes with workers of their own, models that come and go."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import grpc
import httpx
import pytest
from tests.e2e.test_models import greedy_ids
from tests.unit.model.architectures import VARIANTS, save_variant
from tests.unit.model.gguf_copy import write_gguf
from tests.unit.model.tiny import TinyLlama, prompt_ids

from weir.client import WeirClient
from weir.core.errors import NotFound
from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import ProcessView, Stack
from weir.wire.v1 import inference_pb2

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

NUM_TOKENS = 24
PROMPT = prompt_ids(70, seed=2)
CHAT = [{"role": "user", "content": " "}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": " "},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": " "},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/tokenize": {"prompt": " "},
    "/detokenize": {"tokens": [1]},
}
TABLES = """
[up]
precision = "fp32"
arena_bytes = "32MiB"
max_context_tokens = 128

[models.qwen]
model = "{qwen}"

[models.llama]
model = "{llama}"
aliases = ["org/chat", "small"]

[groups.fast]
lanes = ["interactive"]
models = ["llama"]
"""


def save(folder: Path, variant_name: str) -> tuple[TinyLlama, Path]:
    tiny = save_variant(folder / f"hf-{variant_name}", next(one for one in VARIANTS if one.name == variant_name))
    path = folder / f"tiny-{variant_name}.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32)
    return tiny, path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """The tokens of transformers, by model."""
    return {name: greedy_ids(save(folder, name)[0], PROMPT, NUM_TOKENS) for name in ("qwen2", "llama")}


@pytest.fixture(scope="module")
def stack(folder: Path, expected: dict[str, list[int]]) -> Iterator[Stack]:
    del expected  # the models are there
    config = folder / "stack.toml"
    config.write_text(TABLES.format(qwen=folder / "tiny-qwen2.gguf", llama=folder / "tiny-llama.gguf"))
    flags = ("--config", str(config), "--gateways", "2")
    environ = {"WEIR_SERVES_LOCALLY": "false"}
    with Stack(folder / "run", flags=flags, environ=environ) as stack:
        yield stack


def request(model: str, lane: str = "") -> inference_pb2.GenerateRequest:
    made = greedy_request(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, lane=lane)
    made.options.model = model
    return made


def generate(stack: Stack, model: str, lane: str = "") -> StreamRecord:
    async def run() -> StreamRecord:
        channel, stub = open_stub(stack.grpc_address)
        async with channel:
            return await stream(stub, request(model, lane))

    return asyncio.run(run())


def process(stack: Stack, name: str) -> ProcessView:
    return next(view for view in stack.processes() if view.name == name)


def num_steps(stack: Stack) -> dict[str, float]:
    """Of decoding, by process."""
    return {one.name: stack.metrics(one)["decode_steps_total"] for one in stack.processes("decode")}


def test_each_request_is_answered_by_the_model_that_it_names(stack: Stack, expected: dict[str, list[int]]) -> None:
    assert expected["qwen2"] != expected["llama"]
    for model, tokens in (("qwen", "qwen2"), ("llama", "llama"), ("org/chat", "llama"), ("small", "llama")):
        record = generate(stack, model)
        assert (record.code, record.details, record.token_ids) == (grpc.StatusCode.OK, "", expected[tokens])


def test_every_api_knows_all_models_and_no_other(stack: Stack) -> None:
    for url in stack.http_urls():
        with httpx.Client(base_url=url, timeout=60) as http:
            listed = {entry["id"]: entry["root"] for entry in http.get("/v1/models").json()["data"]}
            assert listed == {"qwen": "qwen", "llama": "llama", "org/chat": "llama", "small": "llama"}
            assert http.get("/v1/models/org/chat").json()["root"] == "llama"
            for path, body in BODIES.items():
                for model, file_stem in (("qwen", "tiny-qwen2"), ("small", "tiny-llama")):
                    answer = http.post(path, json={"model": model, **body})
                    if "chat template" in answer.text:  # these have none, and the error says which has none
                        assert (answer.status_code, file_stem in answer.text) == (400, True)
                    else:
                        assert (path, model, answer.status_code) == (path, model, 200), answer.text
                answer = http.post(path, json={"model": "gpt-5", **body})
                assert (path, answer.status_code, "gpt-5" in answer.text) == (path, 404, True), answer.text
    with WeirClient(stack.grpc_address) as client:
        assert {one.name: one.aliases for one in client.list_models()} == {"qwen": (), "llama": ("org/chat", "small")}
        assert client.tokenize(" ", model="qwen") == client.tokenize(" ", model="small")
        with pytest.raises(NotFound, match="'gpt-5' is not served here; one of qwen, llama, org/chat, small is"):
            client.tokenize(" ", model="gpt-5")


def test_a_lane_with_a_group_has_its_pair_to_itself(stack: Stack, expected: dict[str, list[int]]) -> None:
    """decode-2 is the group's; decode-0 is of the other model."""
    before = num_steps(stack)
    for _ in range(4):
        assert generate(stack, "llama", "interactive").token_ids == expected["llama"]
    own = num_steps(stack)
    assert own["decode-2"] > before["decode-2"]
    assert (own["decode-0"], own["decode-1"]) == (before["decode-0"], before["decode-1"])
    for _ in range(4):
        assert generate(stack, "llama", "batch").token_ids == expected["llama"]
    after = num_steps(stack)
    assert after["decode-1"] > own["decode-1"]
    assert (after["decode-0"], after["decode-2"]) == (own["decode-0"], own["decode-2"])


def test_a_model_that_has_no_worker_of_the_group_serves_the_lane_all_the_same(
    stack: Stack, expected: dict[str, list[int]]
) -> None:
    assert generate(stack, "qwen", "interactive").token_ids == expected["qwen2"]


def test_models_come_and_go_under_load_and_nobody_is_cut_off(
    stack: Stack, folder: Path, expected: dict[str, list[int]]
) -> None:
    flags = ("--model", str(folder / "tiny-llama.gguf"), "--precision", "fp32", "--arena-bytes", "32MiB")
    context = ("--max-context-tokens", "128", "--instance", stack.instance)
    twice = stack.weir("models", "add", "third", *flags, *context, "--alias", "small")
    assert "a name means one model" in twice.stderr
    missing = stack.weir("models", "add", "broken", "--model", str(folder / "none.gguf"), *context)
    assert (missing.returncode, "none.gguf" in missing.stderr) == (1, True)
    added = stack.weir("models", "add", "third", *flags, *context, "--alias", "new", timeout_s=180)
    assert added.returncode == 0, added.stderr
    assert generate(stack, "new").token_ids == expected["llama"]

    async def ask_while_it_goes() -> list[StreamRecord]:
        channel, stub = open_stub(stack.grpc_address)
        removing = asyncio.create_task(
            asyncio.to_thread(stack.weir, "models", "remove", "new", "--instance", stack.instance, timeout_s=180)
        )
        records: list[StreamRecord] = []

        async def ask_again_and_again() -> None:
            while not removing.done():
                records.append(await stream(stub, request("third")))
                await asyncio.sleep(0.01)

        async with channel:
            await asyncio.gather(*(ask_again_and_again() for _ in range(4)))
            records.append(await stream(stub, request("third")))
        removed = await removing
        assert removed.returncode == 0, removed.stderr
        return records

    records = asyncio.run(ask_while_it_goes())
    codes = {record.code for record in records}
    assert codes == {grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND}, [record.details for record in records]
    assert records[-1].code is grpc.StatusCode.NOT_FOUND
    assert all(one.token_ids == expected["llama"] for one in records if one.code is grpc.StatusCode.OK)
    assert [view.name for view in stack.processes("transfer")] == ["transfer-0", "transfer-1"]
    for name, tokens in (("qwen", "qwen2"), ("llama", "llama")):
        assert generate(stack, name).token_ids == expected[tokens]


def test_the_last_model_stays(stack: Stack) -> None:
    """Last: it takes one of the two away."""
    for name, returncode in (("small", 0), ("gone", 1), ("qwen", 1)):
        removed = stack.weir("models", "remove", name, "--instance", stack.instance, timeout_s=180)
        assert removed.returncode == returncode, removed.stderr
    assert "is the only one" in removed.stderr
    assert stack.integrity_errors() == []
