"""A trace as the load of a run."""

from pathlib import Path

import numpy as np
import pytest

from weir.sim.workloads.replay import Replay, load_workload


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "arena.csv"
    rows = "".join(f"{i * i},t,{10 + i},{5 + i}\n" for i in range(20))
    path.write_text("arrival_s,tenant,prompt_len,output_len\n" + rows)
    return path


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "9,4\n" * 20)
    return path


def test_a_trace_is_replayed_as_it_was(trace: Path) -> None:
    assert [r.arrival_s for r in load_workload(trace, Replay()).requests] == [float(i * i) for i in range(20)]


def test_a_rate_stretches_its_pattern(trace: Path) -> None:
    times = [r.arrival_s for r in load_workload(trace, Replay(num_requests=11, rate_a_s=10)).requests]
    assert times == pytest.approx([i * i / 100 for i in range(11)])


def test_other_arrivals_keep_the_order_of_the_requests(trace: Path) -> None:
    for kind in ("poisson", "gamma"):
        workload = load_workload(trace, Replay(arrivals=kind, rate_a_s=5.0, cv=3.0), seed=3)
        assert [r.num_prompt_tokens for r in workload.requests] == [10 + i for i in range(20)]
        assert workload == load_workload(trace, Replay(arrivals=kind, rate_a_s=5.0, cv=3.0), seed=3)
        assert workload != load_workload(trace, Replay(arrivals=kind, rate_a_s=5.0, cv=3.0), seed=4)
    burst = load_workload(trace, Replay(arrivals="burst"))
    assert np.ptp([r.arrival_s for r in burst.requests]) == 0


def test_lengths_without_times_need_arrivals(lengths: Path) -> None:
    with pytest.raises(ValueError, match=r"arrivals 'trace': .* lengths alone"):
        load_workload(lengths, Replay(rate_a_s=1.0))
    assert len(load_workload(lengths, Replay(rate_a_s=1.0, arrivals="poisson")).requests) == 20


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"arrivals": "poisson"}, "rate_a_s 0: poisson arrivals need a rate"),
        ({"rate_a_s": -1}, "rate_a_s -1"),
        ({"arrivals": "never"}, "arrivals 'never'"),
        ({"num_requests": -1}, "num_requests -1"),
    ],
)
def test_what_cannot_be_replayed_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Replay(**fields)  # type: ignore[arg-type]
