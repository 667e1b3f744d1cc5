"""The GPU path through a whole stack, on a machine without a GPU: its kernels in Triton's interpreter, over page memory
that the transfer service makes and hands to workers as a descriptor."""

import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from weir.client import GenerateOptions, WeirClient
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.kv.geometry import num_pages_for
from weir.model.files.config import load_model_config
from weir.model.files.source import resolve_model
from weir.model.torch.runner import TorchRunner
from weir.model.torch.weights import WeightFormat, load_weights, weights_bytes
from weir.testing.stack import ProcessView, Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(300)]

NUM_TOKENS = 6
PROMPTS = [[(11 * i + 3) % 1024 for i in range(37)], [5], [(7 * i) % 1024 for i in range(20)]]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=77),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=5),
]


@pytest.fixture(scope="module")
def interpreter_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = ("--load", "dummy", "--model-shape", "tiny", "--max-context-tokens", "128")
    flags = ("--device", "interpreter", *model, "--arena-bytes", str(8 << 20))
    # as on a GPU, where it is the default
    environ = {"WEIR_SERVES_LOCALLY": "false", "WEIR_ASYNC_SCHEDULING": "on"}
    with Stack(tmp_path_factory.mktemp("run"), flags=flags, environ=environ) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """By PyTorch in fp32, one prompt at a time, in this process."""
    source = resolve_model("dummy:tiny")
    config = load_model_config(source)
    pages = np.zeros((num_pages_for(128), config.page_geometry.page_bytes), np.uint8)
    runner = TorchRunner(config, load_weights(source, config), pages)
    return [tokens_of(runner, prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def tokens_of(runner: TorchRunner, prompt: list[int], params: SamplingParams) -> list[int]:
    tokens, start = list(prompt), 0
    for index in range(NUM_TOKENS):
        table = tuple(range(num_pages_for(len(tokens))))
        chunk = ChunkPlan(0, start, tuple(tokens[start:]), table, SampleSpec(params, index))
        start = len(tokens)
        tokens.append(runner.run(StepPlan(0, (chunk,))).token_ids[0])
    return tokens[len(prompt) :]


def answers(stack: Stack, numbers: Sequence[int]) -> list[list[int]]:
    with WeirClient(stack.grpc_address) as client:
        return [
            [token_id for chunk in client.generate(PROMPTS[n], options_of(PARAMS[n])) for token_id in chunk.token_ids]
            for n in numbers
        ]


def options_of(params: SamplingParams) -> GenerateOptions:
    return GenerateOptions(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
    )


def mapping_roles(processes: Sequence[ProcessView]) -> list[str]:
    """Of the processes that map page memory."""
    maps = {process.role: Path(f"/proc/{process.pid}/maps").read_text() for process in processes}
    return sorted(role for role, text in maps.items() if "memfd:weir-pages" in text)


def test_tokens_are_those_of_the_cpu_and_no_page_is_copied(interpreter_stack: Stack, expected: list[list[int]]) -> None:
    assert len({token_id for token_ids in expected for token_id in token_ids}) > 8, "one token fits any model"
    assert answers(interpreter_stack, [0, 1, 2]) == expected
    processes = interpreter_stack.processes()
    assert mapping_roles(processes) == ["decode", "prefill", "transfer"]
    by_role = {process.role: interpreter_stack.metrics(process) for process in processes if process.role != "nats"}
    assert by_role["prefill"]["hand_off_bytes_copied_total"] == 0
    assert by_role["decode"]["taken_over_total"] == 3
    assert interpreter_stack.integrity_errors() == []


def test_workers_map_one_copy_of_the_weights(interpreter_stack: Stack) -> None:
    config = load_model_config(resolve_model("dummy:tiny"))
    assert interpreter_stack.metric("transfer", "weights_bytes") == weights_bytes(config, WeightFormat(torch.float32))
    assert interpreter_stack.metric("transfer", "weights_users") == 2


@pytest.mark.golden
def test_pages_outlive_the_service_that_made_them(interpreter_stack: Stack, expected: list[list[int]]) -> None:
    """The restarted service gets the memory from a worker, and hands it to the next one that starts.

    Golden for its length: that a service goes on with what workers kept is tested in tests/unit/transfer too.
    """
    assert answers(interpreter_stack, [0]) == expected[:1]
    for role in ("transfer", "decode"):
        killed = interpreter_stack.processes(role)[0]
        interpreter_stack.kill(killed, signal.SIGKILL)
        wait_until(partial(interpreter_stack.has_restarted, killed), timeout_s=60, what=f"{role} is ready again")
    assert interpreter_stack.metric("transfer", "cached_pages") > 0
    assert answers(interpreter_stack, [0, 2]) == [expected[0], expected[2]]
    processes = interpreter_stack.processes()
    assert mapping_roles(processes) == ["decode", "prefill", "transfer"]
    assert [process.num_restarts for process in processes if process.role == "prefill"] == [0]
    assert interpreter_stack.integrity_errors() == []
