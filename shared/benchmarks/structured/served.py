"""Answers of a whole stack that are held to schemas: each is valid, and has the tokens that it has alone, while
sequences are preempted and workers die."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from benchmarks.structured.engine_checks import validation_problem
from weir.client import GenerateOptions
from weir.core.grammar import Grammar
from weir.rpc.conversions import options_to_pb
from weir.testing.load import StreamRecord, open_stub, stream
from weir.testing.stack import Stack, wait_until
from weir.wire.v1 import inference_pb2, types_pb2

MAX_CONTEXT_TOKENS = 512
MAX_TOKENS = 400
_STREAM_TIMEOUT_S = 300.0
_RESTART_TIMEOUT_S = 90.0
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """`num_pages` are too few for what is promised, so that sequences give way. `ending_bias` makes those of a model
    with random weights come to an end."""

    model: str
    arena_bytes: int
    ending_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class ServedCounts:
    """Of the answers in the batch."""

    num_answers: int = 0
    num_ended: int = 0
    num_at_max_tokens: int = 0
    num_failed: int = 0
    num_invalid: int = 0
    num_compared: int = 0
    num_different: int = 0
    num_kills: int = 0
    num_adopted: float = 0.0
    num_preempted: float = 0.0
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [
            f"answers {self.num_answers}: ended {self.num_ended}, at max_tokens {self.num_at_max_tokens}, "
            f"failed {self.num_failed}; of the ended ones invalid {self.num_invalid}",
            f"beside the same alone {self.num_compared}, other tokens {self.num_different}",
            f"decode workers killed {self.num_kills}, sequences adopted {self.num_adopted:g}, "
            f"preempted (by workers that lived) {self.num_preempted:g}",
            *self.problems[:_MAX_PROBLEMS],
        ]


def serve_schemas(
    served: ModelToServe,
    schemas: Sequence[dict[str, Any]],
    *,
    at_a_time: int,
    num_alone: int,
    kill_every_s: float,
    runtime_dir: Path,
) -> ServedCounts:
    """Each schema greedy and at temperature 1.3; the first `num_alone` requests once more, one at a time."""
    environ = {
        "WEIR_PAGE_OVERCOMMIT": "4",
        "WEIR_MAX_CONTEXT_TOKENS": str(MAX_CONTEXT_TOKENS),
        "WEIR_MAX_STALL_S": "120",
        "WEIR_MAX_PREEMPTIONS": "50",
    }
    flags = ("--model", served.model, "--arena-bytes", str(served.arena_bytes))
    requests = [
        _request(number, schema, temperature, served.ending_token_ids)
        for number, schema in enumerate(schemas)
        for temperature in (0.0, 1.3)
    ]
    counts = ServedCounts()
    with Stack(runtime_dir, num_decode=2, flags=flags, environ=environ) as stack:
        together = asyncio.run(_serve(stack, requests, at_a_time, kill_every_s, counts))
        for number, record in enumerate(together):
            _judge(counts, schemas[number // 2], record, f"schema {number // 2}")
        wait_until(stack.is_idle, timeout_s=_RESTART_TIMEOUT_S, what="idle")
        counts.num_adopted = stack.metric_of_leader("adopted_total")
        counts.num_preempted = stack.metric("decode", "preemptions_total")
        counts.problems += stack.integrity_errors()
        alone = asyncio.run(_serve(stack, requests[:num_alone], 1, 0.0, counts))
    for number, (one, other) in enumerate(zip(alone, together[:num_alone], strict=True)):
        counts.num_compared += 1
        if one.token_ids != other.token_ids:
            counts.num_different += 1
            counts.problems.append(f"request {number}: alone {one.text[-80:]!r}, together {other.text[-80:]!r}")
    return counts


def _request(
    number: int, schema: dict[str, Any], temperature: float, ending_token_ids: Sequence[int]
) -> inference_pb2.GenerateRequest:
    options = GenerateOptions(
        grammar=Grammar.json_schema(schema),
        temperature=temperature,
        seed=number,
        max_tokens=MAX_TOKENS,
        logit_bias=tuple((token_id, 1.0) for token_id in ending_token_ids),
    )
    return inference_pb2.GenerateRequest(text=f"Example {number}, as JSON: ", options=options_to_pb(options))


async def _serve(
    stack: Stack,
    requests: Sequence[inference_pb2.GenerateRequest],
    at_a_time: int,
    kill_every_s: float,
    counts: ServedCounts,
) -> list[StreamRecord]:
    channel, stub = open_stub(stack.grpc_address)
    places = asyncio.Semaphore(at_a_time)

    async def one(request: inference_pb2.GenerateRequest) -> StreamRecord:
        async with places:
            return await stream(stub, request, timeout_s=_STREAM_TIMEOUT_S)

    async with channel:
        killing = asyncio.create_task(_kill(stack, kill_every_s, counts)) if kill_every_s else None
        try:
            return await asyncio.gather(*map(one, requests))
        finally:
            if killing is not None:
                killing.cancel()


async def _kill(stack: Stack, every_s: float, counts: ServedCounts) -> None:
    """One decode worker and then the other, each when the last one is back."""
    while True:
        await asyncio.sleep(every_s)
        victim = (await asyncio.to_thread(stack.processes, "decode"))[counts.num_kills % 2]
        stack.kill(victim)
        counts.num_kills += 1
        await asyncio.to_thread(
            wait_until, partial(stack.has_restarted, victim), timeout_s=_RESTART_TIMEOUT_S, what="the worker is back"
        )


def _judge(counts: ServedCounts, schema: dict[str, Any], record: StreamRecord, name: str) -> None:
    counts.num_answers += 1
    if record.code is not grpc.StatusCode.OK:
        counts.num_failed += 1
        counts.problems.append(f"{name}: {record.code.name} {record.details[:120]}")
    elif record.finish_reasons != [types_pb2.FINISH_REASON_STOP]:
        counts.num_at_max_tokens += 1
    else:
        counts.num_ended += 1
        problem = _problem(schema, record.text)
        if problem:
            counts.num_invalid += 1
            counts.problems.append(f"{name}: {record.text[:100]!r}: {problem[:100]}")


def _problem(schema: dict[str, Any], text: str) -> str:
    try:
        return validation_problem(schema, json.loads(text))
    except ValueError as error:
        return str(error)
