"""A device writes after it was asked to: nobody else gets a page before it has done so."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux only")

import torch
from tests.unit.model.late_device import WRITTEN, LateStream, late_runner
from tests.unit.worker.in_memory_arena import InMemoryArenaClient
from tests.unit.worker.rig import (
    GATEWAY,
    MAX_CONTEXT_TOKENS,
    NUM_PAGES,
    Rig,
    Stream,
    cancel_command,
    connected,
    eventually,
    hold,
    running_rig,
    start_command,
)

from weir.core.life import Attempt
from weir.engine.messages import SequenceKey
from weir.engine.plan import StepPlan
from weir.kv.messages import PageChain
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.model.triton.batch import TritonLimits
from weir.wire.v1 import types_pb2, worker_pb2

PROMPT = list(range(100))
LIMITS = TritonLimits(max_rows=64, max_sequences=8, max_context_tokens=MAX_CONTEXT_TOKENS)


async def cancel(rig: Rig, stream: Stream, start: worker_pb2.Start) -> None:
    """Returns when the worker has it, so that nothing more is sampled."""
    await stream.send(cancel=cancel_command(start))
    key = SequenceKey(start.request_id, Attempt())
    await eventually(lambda: not rig.prefill.shell._manager.is_wanted(key))


@pytest.fixture
def device() -> LateStream:
    return LateStream()


@pytest.fixture
async def late(monkeypatch: pytest.MonkeyPatch, device: LateStream) -> AsyncIterator[tuple[Rig, torch.Tensor]]:
    """Both workers on that device, and its pages."""
    runner, pages = late_runner(monkeypatch, device, NUM_PAGES, LIMITS)
    async with running_rig(runner=runner) as rig:
        yield rig, pages


async def test_pages_that_another_lease_finds_are_written(late: tuple[Rig, torch.Tensor]) -> None:
    rig, pages = late
    release = threading.Event()

    def hold_second_chunk(plan: StepPlan) -> None:
        if plan.chunks[0].start >= 32:
            hold(release)

    rig.on_run["prefill"] = hold_second_chunk
    second = InMemoryArenaClient(rig.arena, "second", lambda _: None)
    await second.start()
    hashes = page_hashes(PROMPT, prefix_seed("", salt=""))
    start = start_command(rig.decode.worker_id, prompt_token_ids=PROMPT)
    async with connected(rig.prefill, GATEWAY) as stream:
        await stream.send(start=start)
        await eventually(lambda: len(rig.arena.prefixes.find_prefix(hashes)) == 2)

        found = await second.match(hashes, num_pages=7, num_slots=0)

        assert len(found.page_ids) == 2
        assert bool((pages[list(found.page_ids)] == WRITTEN).all())
        await cancel(rig, stream, start)
        release.set()
        assert (await stream.next_update(start.request_id)).finish_reason == types_pb2.FINISH_REASON_CANCELLED
    await second.release(found.acquired.page_ids, found.acquired.slots, [PageChain(found.page_ids)], [found.match_id])
    await rig.wait_idle()


async def test_pages_that_a_cancel_puts_back_are_written_no_more(
    late: tuple[Rig, torch.Tensor], device: LateStream
) -> None:
    rig, _ = late
    is_running, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold_first_chunk(plan: StepPlan) -> None:
        del plan
        loop.call_soon_threadsafe(is_running.set)
        hold(release)

    pending_at_release: list[int] = []
    rig.on_run["prefill"] = hold_first_chunk

    async def note() -> None:
        pending_at_release.append(device.num_pending)

    rig.arena.before_release = note
    start = start_command(rig.decode.worker_id, prompt_token_ids=PROMPT, skips_prefix_cache=True)
    async with connected(rig.prefill, GATEWAY) as stream:
        await stream.send(start=start)
        await asyncio.wait_for(is_running.wait(), 10)
        await cancel(rig, stream, start)
        release.set()
        assert (await stream.next_update(start.request_id)).finish_reason == types_pb2.FINISH_REASON_CANCELLED
        await rig.wait_idle()
    assert pending_at_release
    assert set(pending_at_release) == {0}
