"""Families as text: Prometheus' own format or OpenMetrics, by what the reader accepts. prometheus-client writes it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from weir.telemetry.families import Family, Kind
from weir.telemetry.histogram import HistogramValue

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_MAX_LINES_AT_ONCE = 300
"""About two milliseconds, for which an event loop stands still."""
_EOF = b"# EOF\n"
_OPENMETRICS = "application/openmetrics-text"


@dataclass(frozen=True, slots=True)
class Page:
    """What a scrape is answered with."""

    content: bytes
    content_type: str


class _Families:
    """prometheus-client's collector of what was gathered already."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> "Iterator[Metric]":
        return map(_metric, self._families)


def is_openmetrics(accept: str) -> bool:
    """Whether a reader with this `Accept` takes OpenMetrics, which alone has exemplars."""
    return any(part.partition(";")[0].strip().lower() == _OPENMETRICS for part in accept.split(","))


async def render(families: Sequence[Family], *, as_openmetrics: bool) -> Page:
    """Lets the event loop go on between parts of the page."""
    encode, content_type = await asyncio.to_thread(_encoder, as_openmetrics=as_openmetrics)  # it may have to be loaded
    parts = [part async for part in _parts(families, encode)]
    return Page(b"".join(parts) + (_EOF if as_openmetrics else b""), content_type)


def _encoder(*, as_openmetrics: bool) -> "tuple[Callable[[_Families], bytes], str]":
    # 80 ms, for processes that nobody scrapes
    from prometheus_client import exposition  # noqa: PLC0415
    from prometheus_client.openmetrics import exposition as openmetrics  # noqa: PLC0415

    if not as_openmetrics:
        return exposition.generate_latest, exposition.CONTENT_TYPE_PLAIN_0_0_4
    # By default prometheus-client 0.26 writes vllm_x for vllm:x, though in samples alone. No name here needs escaping.
    encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
    return encode, openmetrics.CONTENT_TYPE_LATEST


async def _parts(families: Sequence[Family], encode: "Callable[[_Families], bytes]") -> AsyncIterator[bytes]:
    for family in families:
        for index, part in enumerate(split(family)):
            text = encode(_Families([part])).removesuffix(_EOF)
            yield text if index == 0 else _without_head(text)
            await asyncio.sleep(0)


def split(family: Family) -> Iterator[Family]:
    """The same in parts that are short enough for one go; at least one."""
    begin, num_lines = 0, 0
    for index, sample in enumerate(family.samples):
        own = len(sample.value.counts) + 2 if isinstance(sample.value, HistogramValue) else 1
        if num_lines and num_lines + own > _MAX_LINES_AT_ONCE:
            yield replace(family, samples=family.samples[begin:index])
            begin, num_lines = index, 0
        num_lines += own
    yield replace(family, samples=family.samples[begin:])


def _without_head(text: bytes) -> bytes:
    """Of a family that has begun before."""
    lines = text.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"#"))


def _metric(family: Family) -> "Metric":
    from prometheus_client.core import Metric  # noqa: PLC0415 - as above

    name = family.name.removesuffix("_total") if family.kind is Kind.COUNTER else family.name
    metric = Metric(name, family.help, family.kind.value)
    for sample in family.samples:
        labels = dict(sample.labels)
        if isinstance(sample.value, HistogramValue):
            _add_histogram(metric, labels, sample.value)
        else:
            metric.add_sample(family.name, labels, sample.value)
    return metric


def _add_histogram(metric: "Metric", labels: dict[str, str], value: HistogramValue) -> None:
    from prometheus_client.samples import Exemplar  # noqa: PLC0415 - as above
    from prometheus_client.utils import floatToGoString  # noqa: PLC0415 - as above

    names = [*map(floatToGoString, value.edges), "+Inf"]
    exemplars = value.exemplars or (None,) * len(names)
    for edge, count, seen in zip(names, value.cumulative, exemplars, strict=True):
        exemplar = None if seen is None else Exemplar({"trace_id": seen.trace_id}, seen.value, seen.at_s)
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": edge}, count, exemplar=exemplar)
    metric.add_sample(f"{metric.name}_sum", labels, value.total)
    metric.add_sample(f"{metric.name}_count", labels, value.num)
