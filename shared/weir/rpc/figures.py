"""Figures of a process to and from `Admin/Describe`."""

from weir.telemetry.described import Described, HistogramFigure
from weir.telemetry.histogram import Exemplar, HistogramValue
from weir.wire.v1 import admin_pb2


def histogram_to_pb(figure: HistogramFigure) -> admin_pb2.Histogram:
    value = figure.value
    return admin_pb2.Histogram(
        name=figure.name,
        labels=dict(figure.labels),
        edges=value.edges,
        counts=value.counts,
        total=value.total,
        exemplars=[
            admin_pb2.Exemplar(bucket=bucket, value=seen.value, trace_id=seen.trace_id, at_s=seen.at_s)
            for bucket, seen in enumerate(value.exemplars)
            if seen is not None
        ],
    )


def described_from_pb(message: admin_pb2.DescribeResponse) -> Described:
    """Without histograms of which edges and counts do not go together."""
    histograms = [_histogram_from_pb(one) for one in message.histograms if len(one.counts) == len(one.edges) + 1]
    return Described(message.role, message.process_id, dict(message.metrics), histograms)


def _histogram_from_pb(message: admin_pb2.Histogram) -> HistogramFigure:
    seen = {one.bucket: Exemplar(one.value, one.trace_id, one.at_s) for one in message.exemplars}
    exemplars = tuple(map(seen.get, range(len(message.counts)))) if seen else ()
    value = HistogramValue(tuple(message.edges), tuple(message.counts), message.total, exemplars)
    return HistogramFigure(message.name, value, tuple(sorted(message.labels.items())))
