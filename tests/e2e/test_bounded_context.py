"""An arena too small for the model's context: every part of the stack goes by the number that `weir up` tells."""

import re
from pathlib import Path

import httpx
import pytest

from weir.client import GenerateOptions, WeirClient
from weir.core.addresses import free_port
from weir.core.errors import InvalidRequest
from weir.testing.stack import Stack, wait_until

pytestmark = pytest.mark.stack

TINY = ("--load", "dummy", "--model-shape", "tiny")


def test_the_context_that_is_told_is_the_one_that_is_served_to_the_last_token(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "run")
    ports = ("--grpc-port", str(stack.grpc_port), "--http-port", str(stack.http_port))
    try:
        started = stack.weir(
            *("up", "--detach", "--instance", stack.instance, *ports, *TINY, "--arena-bytes", "8.5MiB"), timeout_s=180
        )
        assert started.returncode == 0, started.stderr
        told = re.search(r"max_context_tokens is (\d+), not the model's 2048: --arena-bytes \d+MiB", started.stderr)
        assert told is not None, started.stderr
        assert_serves_exactly(stack, int(told[1]))
    finally:
        stack.stop()


def assert_serves_exactly(stack: Stack, context: int) -> None:
    assert 512 <= context < 2048
    with WeirClient(stack.grpc_address, timeout_s=60) as client:
        wait_until(
            lambda: client.list_models()[0].max_context_tokens == context, timeout_s=20, what="workers are known"
        )
        [shown] = httpx.get(f"{stack.http_url}/v1/models").json()["data"]
        assert shown["max_model_len"] == context
        whole = list(client.generate([1] * (context - 4), GenerateOptions(temperature=0)))
        assert sum(len(chunk.token_ids) for chunk in whole) == 4
        with pytest.raises(InvalidRequest, match=f"is {context} tokens; dummy:tiny takes at most {context - 1}"):
            list(client.generate([1] * context))


def test_a_context_that_is_asked_for_and_does_not_fit_starts_nothing_and_says_what_would(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "run")
    ports = ("--grpc-port", str(free_port()), "--http-port", str(free_port()))
    asked = ("--arena-bytes", "8.5MiB", "--max-context-tokens", "2048")
    try:
        shown = stack.weir("up", "--instance", stack.instance, *ports, *TINY, *asked, timeout_s=180)
    finally:
        stack.stop()
    assert shown.returncode == 1
    assert "too small for one sequence of 2048 tokens" in shown.stderr
    assert re.search(r"give at least \d+ \([\d.]+ MiB\), or a smaller max_context_tokens; \d+ would fit", shown.stderr)
