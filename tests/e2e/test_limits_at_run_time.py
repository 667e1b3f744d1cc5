"""Bounds that operators set while a stack runs: in force for the next request, after a restart of the scheduler too."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from weir.client import GenerateOptions, WeirClient
from weir.client.scheduling import SchedulingClient
from weir.core.errors import InvalidRequest, QuotaExceeded
from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _as_configured_afterwards(stack: Stack, limits_path: Path) -> Iterator[None]:
    """A file that says something new goes over what was set."""
    yield
    for text in ("# another file\n", ""):
        limits_path.write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest() if text else ""
        with SchedulingClient([stack.processes("scheduler")[0].address]) as scheduling:
            wait_until(
                lambda digest=digest: scheduling.describe().limits_digest == digest,  # type: ignore[misc]
                timeout_s=15,
                what="the file is read",
            )


def set_limits(stack: Stack, *settings: str) -> list[dict[str, Any]]:
    """What `weir limits set --json` answers, once gateway and workers know of it."""
    gateway = stack.processes("gateway")[0]
    changes = stack.metrics(gateway)["access_rules_changes_total"]
    done = stack.weir("limits", "set", *settings, "--json", "--instance", stack.instance)
    assert done.returncode == 0, done.stderr
    wait_until(
        lambda: stack.metrics(gateway)["access_rules_changes_total"] > changes, timeout_s=30, what="the gateway knows"
    )
    answer: list[dict[str, Any]] = json.loads(done.stdout)
    return answer


def restart_scheduler(stack: Stack) -> None:
    scheduler = stack.processes("scheduler")[0]
    gateway = stack.processes("gateway")[0]
    changes = stack.metrics(gateway)["access_rules_changes_total"]
    stack.kill(scheduler)
    wait_until(lambda: stack.has_restarted(scheduler), timeout_s=40, what="another scheduler is ready")
    wait_until(
        lambda: stack.metrics(gateway)["access_rules_changes_total"] > changes, timeout_s=30, what="its rules are known"
    )


def generate(stack: Stack, max_tokens: int | None = None, lane: str = "batch") -> int:
    """How many tokens came."""
    options = GenerateOptions(max_tokens=max_tokens, temperature=0.0, lane=lane, ignore_eos=True)
    with WeirClient(stack.grpc_address, timeout_s=60) as client:
        return sum(len(chunk.token_ids) for chunk in client.generate("The capital of France is", options))


def assert_batch_is_capped(stack: Stack) -> None:
    with pytest.raises(InvalidRequest, match="is 4; lane 'batch' takes at most 3"):
        generate(stack, max_tokens=4)
    assert generate(stack) == 3, "what is left out takes the cap"
    assert generate(stack, max_tokens=4, lane="standard") == 4
    body = {"model": "smollm2-135m", "prompt": "x", "max_tokens": 4, "lane": "batch", "top_k": 50}
    response = httpx.post(f"{stack.http_url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 400
    assert "max_tokens: is 4; lane 'batch' takes at most 3" in response.json()["error"]["message"]
    assert "top_k: is 50; tenant 'default' takes at most 40" in response.json()["error"]["message"]


def test_caps_hold_over_both_apis_for_the_next_request_and_after_a_restart_of_the_scheduler(stack: Stack) -> None:
    made = set_limits(stack, "lanes.batch.max_output_tokens=3", "default_tenant.max_top_k=40")
    assert made == [
        {"key": "lanes.batch.max_output_tokens", "was": "0", "now": "3"},
        {"key": "default_tenant.max_top_k", "was": "0", "now": "40"},
    ]
    assert_batch_is_capped(stack)
    restart_scheduler(stack)
    assert_batch_is_capped(stack)


def test_calls_for_tokens_are_requests_of_their_tenant_too(stack: Stack) -> None:
    set_limits(stack, "default_tenant.requests_per_min=2")
    for _ in range(2):
        assert httpx.post(f"{stack.http_url}/tokenize", json={"prompt": "x"}, timeout=30).status_code == 200
    refused = httpx.post(f"{stack.http_url}/detokenize", json={"tokens": [1]}, timeout=30)
    assert (refused.status_code, refused.headers["X-Weir-Bound"]) == (429, "requests_per_min")
    assert 1 <= int(refused.headers["Retry-After"]) <= 30
    with (
        WeirClient(stack.grpc_address, timeout_s=60) as client,
        pytest.raises(QuotaExceeded, match="its requests_per_min"),
    ):
        client.tokenize("x")


async def test_a_lane_bound_holds_for_the_next_request_and_after_a_restart_of_the_scheduler(stack: Stack) -> None:
    await asyncio.to_thread(
        set_limits, stack, "lanes.batch.max_batch=1", "lanes.batch.max_queued=1", "workers.decode.max_num_seqs=16"
    )
    for is_restarted in (False, True):
        if is_restarted:
            await asyncio.to_thread(restart_scheduler, stack)
        channel, stub = open_stub(stack.grpc_address)
        async with channel:
            records = await asyncio.gather(
                *(
                    stream(stub, greedy_request([900 + n] * 20, max_tokens=40, ignore_eos=True, lane="batch"))
                    for n in range(8)
                )
            )
        codes = [record.code for record in records]
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= 1, codes
        assert codes.count(grpc.StatusCode.OK) >= 1, codes


async def test_fewer_running_sequences_end_none_that_runs_and_a_bad_value_changes_nothing(stack: Stack) -> None:
    decode = (await asyncio.to_thread(stack.processes, "decode"))[0]
    most = stack.metrics(decode)["max_num_seqs"]
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        load = [
            asyncio.create_task(stream(stub, greedy_request([300 + n] * 20, max_tokens=150, ignore_eos=True)))
            for n in range(6)
        ]
        await asyncio.to_thread(
            wait_until,
            lambda: stack.metrics(decode)["num_running"] >= 2,
            timeout_s=30,
            what="some run",
            interval_s=0.02,
        )
        made = await asyncio.to_thread(
            set_limits, stack, "workers.decode.max_num_seqs=1", "workers.prefill.max_num_batched_tokens=64"
        )
        assert [(one["was"], one["now"]) for one in made] == [(None, "1"), (None, "64")]
        await asyncio.to_thread(
            wait_until, lambda: stack.metrics(decode)["max_num_seqs"] == 1, timeout_s=30, what="the worker knows"
        )
        records = await asyncio.gather(*load)
    assert [record.code for record in records] == [grpc.StatusCode.OK] * 6
    assert {len(record.token_ids) for record in records} == {150}
    assert [record for record in records if record.num_terminal_events != 1 or record.num_index_errors] == []
    refused = await asyncio.to_thread(
        stack.weir,
        "limits",
        "set",
        "lanes.batch.max_queued=7",
        f"workers.decode.max_num_seqs={most + 1:.0f}",
        "--instance",
        stack.instance,
    )
    assert refused.returncode == 1
    assert f"workers.decode.max_num_seqs: is {most + 1:.0f}; decode-0" in refused.stderr
    assert f"has room for {most:.0f}" in refused.stderr
    await asyncio.to_thread(restart_scheduler, stack)
    with SchedulingClient([(await asyncio.to_thread(stack.processes, "scheduler"))[0].address]) as scheduling:
        view = scheduling.describe()
    assert dict(view.overrides) == {
        "workers.decode.max_num_seqs": "1",
        "workers.prefill.max_num_batched_tokens": "64",
    }
    assert stack.metrics(decode)["max_num_seqs"] == 1
    assert stack.integrity_errors() == []
