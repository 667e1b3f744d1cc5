"""Times of one request, on a clock that stands still in between."""

import pytest

from weir.bus.messages import Placement
from weir.core.clock import ManualClock
from weir.core.errors import InternalError
from weir.core.life import FinishReason, Phase
from weir_gateway.requests.request_end import RequestEnd
from weir_gateway.requests.request_figures import LaneFigures, RequestFigures
from weir_gateway.requests.request_times import RequestTimes

SPLIT = Placement(1, "p", "p:1", "d", "d:1", 4)
LOCAL = Placement(1, "d", "d:1", "d", "d:1", 4)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
FINISHED = RequestEnd(Phase.FINISHED, finish_reason=FinishReason.LENGTH)


class Life:
    """A request as its gateway sees it."""

    def __init__(self, placement: Placement = SPLIT, trace_id: str = "") -> None:
        self.figures = LaneFigures(1000)
        self.clock = ManualClock(100.0)
        self._placement = placement
        self._num_tokens = 0
        arrived_at_s = self.clock.now_s()
        self.clock.advance(0.5)  # its prompt is tokenized
        self.times = RequestTimes(self.figures, self.clock, arrived_at_s, trace_id)

    def enter(self, *phases: Phase, after_s: float = 0.0) -> "Life":
        self.clock.advance(after_s)
        for phase in phases:
            placed = phase in (Phase.PREFILLING, Phase.HANDING_OFF, Phase.DECODING)
            self.times.on_phase(phase, self._placement if placed else None)
        return self

    def token(self, *, after_s: float, num: int = 1) -> "Life":
        self.clock.advance(after_s)
        self._num_tokens += num
        self.times.on_tokens(self.clock.now_s(), self._num_tokens)
        return self

    def start(self) -> "Life":
        """Queued for 2 s, started 1 s after its grant."""
        self.enter(Phase.RECEIVED).enter(Phase.QUEUED, after_s=0.25).enter(Phase.GRANTED, after_s=1.75)
        return self.enter(Phase.PREFILLING, after_s=1.0)

    def stages(self) -> dict[str, float]:
        found = {stage: histogram.value() for stage, histogram in self.figures.stages.items()}
        return {stage: value.total for stage, value in found.items() if value.num}


def test_each_stage_is_timed_and_they_follow_one_another() -> None:
    life = Life().start().token(after_s=4.0).enter(Phase.HANDING_OFF).enter(Phase.DECODING, after_s=0.125)
    life.token(after_s=0.875).token(after_s=0.5).enter(Phase.FINISHED)
    life.times.end(FINISHED, 40, 16)
    assert life.stages() == {"queue": 2.0, "start": 1.0, "prefill": 4.0, "hand_off": 0.125, "decode": 1.5}
    figures = life.figures
    assert (figures.ttft.value().total, figures.e2e.value().total) == (0.5 + 2 + 1 + 4, 0.5 + 2 + 1 + 4 + 1.5)
    assert (figures.itl.value().num, figures.itl.value().total) == (2, 1.5)
    assert (figures.tpot.value().total, figures.inference.value().total) == (0.75, 6.5)
    assert (figures.prompt_tokens.value().total, figures.computed_prompt_tokens.value().total) == (40, 24)
    assert figures.num_output_tokens == 3
    assert figures.ends == {"length": 1}


def test_a_request_that_one_worker_serves_has_no_hand_off() -> None:
    life = Life(LOCAL).start().token(after_s=1.0).enter(Phase.HANDING_OFF, Phase.DECODING).token(after_s=1.0)
    life.times.end(FINISHED, 1, 0)
    assert life.stages() == {"queue": 2.0, "start": 1.0, "prefill": 1.0, "decode": 1.0}


def test_a_decode_worker_that_is_heard_first_was_handed_it_at_once() -> None:
    life = Life().start().enter(Phase.DECODING, after_s=0.5).token(after_s=0.5).token(after_s=1.0)
    life.times.end(FINISHED, 1, 0)
    assert life.stages() == {"queue": 2.0, "start": 1.0, "prefill": 1.0, "hand_off": 0.0, "decode": 1.0}


def test_tokens_of_one_frame_are_one_gap() -> None:
    life = Life(LOCAL).start().token(after_s=1.0).token(after_s=0.5, num=5)
    assert (life.figures.itl.value().num, life.figures.itl.value().total) == (1, 0.5)
    assert life.figures.num_output_tokens == 6


def test_the_pause_of_an_interruption_is_a_gap_and_stages_add_up() -> None:
    life = Life(LOCAL).start().token(after_s=1.0).token(after_s=0.5)
    life.enter(Phase.QUEUED, after_s=0.5).enter(Phase.GRANTED, after_s=3.0).enter(Phase.PREFILLING, after_s=1.0)
    life.token(after_s=2.0)
    life.times.end(FINISHED, 1, 0)
    assert life.stages() == {"queue": 5.0, "start": 2.0, "prefill": 3.0, "decode": 1.0}
    assert life.figures.itl.value().counts != (0,) * len(life.figures.itl.value().counts)
    assert (life.figures.itl.value().num, life.figures.itl.value().total) == (2, 7.0)
    assert life.figures.ttft.value().num == 1
    assert life.figures.e2e.value().total == sum(life.stages().values()) + 0.5


def test_an_end_that_comes_alone_is_no_token() -> None:
    life = Life(LOCAL).start().token(after_s=1.0).token(after_s=9.0, num=0)
    life.times.end(FINISHED, 1, 0)
    assert life.figures.itl.value().num == 0
    assert life.figures.tpot.value().num == 0
    assert life.stages()["decode"] == 0.0


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (RequestEnd(Phase.CANCELLED), "abort"),
        (RequestEnd(Phase.FAILED, InternalError("x")), "error"),
        (RequestEnd(Phase.REFUSED), "error"),
        (RequestEnd(Phase.FINISHED, finish_reason=FinishReason.DEADLINE), "abort"),
        (RequestEnd(Phase.FINISHED, finish_reason=FinishReason.STOP), "stop"),
    ],
)
def test_each_end_is_counted_by_its_reason(ending: RequestEnd, reason: str) -> None:
    life = Life().start()
    life.times.end(ending, 7, 0)
    assert life.figures.ends == {reason: 1}
    assert life.stages() == {}
    assert life.figures.e2e.value().num == 0


def test_one_that_was_cut_off_after_a_token_counts_its_tokens_and_no_stage() -> None:
    life = Life().start().token(after_s=1.0)
    life.times.end(RequestEnd(Phase.CANCELLED), 7, 3)
    assert (life.figures.num_output_tokens, life.figures.ttft.value().num, life.stages()) == (1, 1, {})


def test_a_sampled_trace_is_an_exemplar_of_what_is_asked_about_first() -> None:
    life = Life(trace_id=TRACE_ID).start().token(after_s=1.0).enter(Phase.HANDING_OFF, Phase.DECODING)
    life.token(after_s=1.0).times.end(FINISHED, 1, 0)
    figures = life.figures
    traced = (figures.ttft, figures.e2e, figures.stages["hand_off"])
    assert [[one.trace_id for one in of.value().exemplars if one] for of in traced] == [[TRACE_ID]] * 3
    assert not any(of.value().exemplars for of in (figures.itl, figures.stages["queue"], figures.stages["decode"]))


def test_figures_are_kept_by_model_and_lane_and_lanes_are_bounded() -> None:
    figures = RequestFigures()
    assert figures.of("m", "a", 100) is figures.of("m", "a", 100)
    for index in range(70):
        figures.of("m", f"lane-{index}", 100).num_output_tokens += 1
    lanes = {dict(figure.labels)["lane"] for figure in figures.histograms()}
    assert (len(lanes), figures.num_dropped) == (65, 7)
    assert figures.metrics()['lane_output_tokens_total{lane="other"}'] == 7.0


def test_lanes_of_a_model_have_the_same_edges_whatever_its_workers_take_meanwhile() -> None:
    figures = RequestFigures()
    figures.of("m", "a", 100)
    figures.of("m", "b", 100_000)
    assert len({one.prompt_tokens.value().edges for one in figures.of_model("m", 7)}) == 1
