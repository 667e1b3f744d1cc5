"""Histograms through `Admin/Describe`."""

from hypothesis import given
from hypothesis import strategies as st

from weir.rpc.figures import described_from_pb, histogram_to_pb
from weir.telemetry.described import HistogramFigure
from weir.telemetry.histogram import Histogram
from weir.wire.v1 import admin_pb2


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from(("", "ab" * 16))), max_size=8))
def test_a_histogram_comes_back_as_it_was(seen: list[tuple[float, str]]) -> None:
    histogram = Histogram((0.5, 1.0, 2.5))
    for index, (value, trace_id) in enumerate(seen):
        histogram.observe_traced(value, trace_id, float(index))
    figure = HistogramFigure("weir_x_seconds", histogram.value(), (("lane", "batch"), ("stage", "queue")))
    message = admin_pb2.DescribeResponse(role="decode", process_id="d", histograms=[histogram_to_pb(figure)])
    found = described_from_pb(admin_pb2.DescribeResponse.FromString(message.SerializeToString()))
    assert (found.role, found.process_id, found.histograms) == ("decode", "d", [figure])


def test_one_whose_parts_do_not_go_together_is_left_out() -> None:
    broken = admin_pb2.Histogram(name="x", edges=[1.0, 2.0], counts=[1, 2])
    assert described_from_pb(admin_pb2.DescribeResponse(histograms=[broken])).histograms == []
