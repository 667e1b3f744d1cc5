"""Ends are released once their gateway has them, or has had its time; a full inbox delays that and loses none."""

from dataclasses import replace

import pytest
from tests.unit.engine.world import params
from tests.unit.worker.test_request_manager import GATEWAY, KEY, Bench, frame_of

from weir.core.life import Attempt, FinishReason
from weir.engine.loop import InboxFull
from weir.engine.messages import (
    Arrival,
    Command,
    EngineReport,
    ReleaseEnds,
    SequenceEnded,
    SequenceKey,
    TokenSampled,
)
from weir.worker.requests.end_releases import EndReleases
from weir.worker.requests.request_tables import Resume

END = SequenceEnded(KEY, FinishReason.LENGTH, is_kept=True)


class KeptBench(Bench):
    """A gateway that gets a sequence, and the releases of what the engine keeps."""

    def __init__(self) -> None:
        super().__init__(takes_hand_offs=True)
        self.releases = EndReleases(self._post, self.manager.is_end_sent, self.clock, kept_s=0.5, max_kept_s=10.0)

    def end(self) -> None:
        self.manager.try_start(self.stream, Arrival(params((1, 2))))
        self.posted.clear()
        self.manager.on_event(TokenSampled(KEY, 0, 11), step=1)
        self.manager.on_event(END, step=1)
        self.releases.on_report(EngineReport(events=(END,)))

    def sweep_after(self, seconds: float) -> list[Command]:
        """What was posted since."""
        self.clock.advance(seconds)
        self.releases.sweep()
        posted = list(self.posted)
        self.posted.clear()
        return posted


async def test_an_end_is_released_a_while_after_the_stream_has_taken_it() -> None:
    bench = KeptBench()
    bench.end()
    assert bench.sweep_after(5.0) == [], "the stream has not taken it"
    await frame_of(bench.stream)
    assert bench.sweep_after(0.0) == []
    assert bench.sweep_after(0.4) == []
    assert bench.sweep_after(0.2) == [ReleaseEnds((KEY,))]
    assert len(bench.releases) == 0
    assert bench.sweep_after(9.0) == []


async def test_without_a_stream_it_is_released_in_the_end() -> None:
    bench = KeptBench()
    bench.end()
    bench.manager.on_stream_end(bench.stream)
    assert bench.sweep_after(9.9) == []
    assert bench.sweep_after(0.2) == [ReleaseEnds((KEY,))]


async def test_a_stream_that_breaks_right_after_taking_it_may_have_lost_it() -> None:
    bench = KeptBench()
    bench.end()
    await frame_of(bench.stream)
    assert bench.sweep_after(0.0) == []
    bench.manager.on_stream_end(bench.stream)
    assert bench.sweep_after(1.0) == []
    stream = bench.hub.attach(GATEWAY)
    bench.manager.resume(stream, Resume(KEY, 0))
    assert bench.sweep_after(1.0) == []
    frame = await frame_of(stream)
    assert list(frame.updates[0].token_ids) == [11]
    assert bench.sweep_after(0.0) == []
    assert bench.sweep_after(0.5) == [ReleaseEnds((KEY,))]


async def test_an_end_that_is_sent_to_nobody_any_more_is_released() -> None:
    bench = KeptBench()
    bench.end()
    bench.manager.try_start(bench.stream, Arrival(replace(params((1, 2)), attempt=Attempt(9, 0))))
    bench.posted.clear()
    assert bench.sweep_after(0.0) == []
    assert bench.sweep_after(0.5) == [ReleaseEnds((KEY,))]


def test_ends_that_are_not_kept_are_not_released() -> None:
    bench = KeptBench()
    bench.releases.on_report(EngineReport(events=(replace(END, is_kept=False),)))
    assert len(bench.releases) == 0


@pytest.mark.parametrize("num_places", [0, 1, 2])
def test_what_a_full_inbox_does_not_take_is_posted_at_a_later_sweep(num_places: int) -> None:
    bench = KeptBench()
    taken: list[Command] = []

    def post(command: Command) -> None:
        if len(taken) >= num_places:
            raise InboxFull("full")
        taken.append(command)

    releases = EndReleases(post, bench.manager.is_end_sent, bench.clock, kept_s=0.0, max_kept_s=10.0)
    keys = [SequenceKey(f"{index:032x}", Attempt()) for index in range(600)]
    releases.on_report(EngineReport(events=tuple(replace(END, key=key) for key in keys)))
    for _ in range(3):
        releases.sweep()
        num_places += 1
    released = [key for command in taken if isinstance(command, ReleaseEnds) for key in command.keys]
    assert released == keys[: len(released)]
    assert max(len(command.keys) for command in taken if isinstance(command, ReleaseEnds)) <= 256
    assert len(released) + len(releases) == 600
    assert len(releases) == (88 if len(taken) == 2 else 0)
