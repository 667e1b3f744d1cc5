"""Figures of a process to and from `Admin`: what `Describe`, `ListSteps` and `MapPages` carry."""

from dataclasses import asdict

from weir.telemetry.described import Described, HistogramFigure
from weir.telemetry.histogram import Exemplar, HistogramValue
from weir.telemetry.internals import PageMap, PageRange, SequenceShare, StepRecord
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


def step_to_pb(step: StepRecord) -> admin_pb2.StepDescription:
    return admin_pb2.StepDescription(
        step=step.step,
        started_at_s=step.started_at_s,
        duration_ms=step.duration_ms,
        num_sequences=step.num_sequences,
        num_tokens=step.num_tokens,
        num_prefill_tokens=step.num_prefill_tokens,
        sequences=[admin_pb2.StepSequence(**asdict(share)) for share in step.sequences],
    )


def step_from_pb(message: admin_pb2.StepDescription) -> StepRecord:
    return StepRecord(
        step=message.step,
        started_at_s=message.started_at_s,
        duration_ms=message.duration_ms,
        num_sequences=message.num_sequences,
        num_tokens=message.num_tokens,
        num_prefill_tokens=message.num_prefill_tokens,
        sequences=tuple(SequenceShare(one.request_id, one.num_prompt_tokens) for one in message.sequences),
    )


def page_map_to_pb(page_map: PageMap) -> admin_pb2.MapPagesResponse:
    ranges = [admin_pb2.PageRange(**asdict(one)) for one in page_map.ranges]
    return admin_pb2.MapPagesResponse(
        num_pages=page_map.num_pages, pages_per_range=page_map.pages_per_range, ranges=ranges
    )


def page_map_from_pb(message: admin_pb2.MapPagesResponse) -> PageMap:
    ranges = tuple(
        PageRange(one.num_free, one.num_leased, one.num_orphaned, one.num_cached, one.num_shared)
        for one in message.ranges
    )
    return PageMap(message.num_pages, message.pages_per_range, ranges)
