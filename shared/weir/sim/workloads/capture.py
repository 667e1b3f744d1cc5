"""Weir's own trace format: one JSON object a request and line, keys named as the fields of `SimRequest`.

`arrival_s`, `num_prompt_tokens` and `num_output_tokens` are always there; `max_tokens`, `request_id`, `lane`, `tenant`,
`deadline_s`, `ttft_target_s`, `itl_target_s`, `prefix_blocks`, `predicted_output_tokens` and `output_score` where they
are known. Other keys are passed over: a log may say more. Arrivals may be on any clock; reading moves the first to 0.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from weir.sim.workloads.trace_file import Record
from weir.sim.workloads.workload import SimRequest

_SECONDS = ("deadline_s", "ttft_target_s", "itl_target_s", "predicted_output_tokens")


def parse_capture(record: Record) -> SimRequest:
    """Raises TraceError. `max_tokens` is 0 where the record does not say."""
    known = {field for field, value in record.fields.items() if value is not None}
    return SimRequest(
        request_id=record.text("request_id") if "request_id" in known else f"line-{record.line}",
        arrival_s=record.number("arrival_s"),
        num_prompt_tokens=record.count("num_prompt_tokens"),
        num_output_tokens=max(1, record.count("num_output_tokens", at_least=0)),
        max_tokens=record.count("max_tokens", at_least=0) if "max_tokens" in known else 0,
        lane=record.text("lane") if "lane" in known else "",
        tenant=record.text("tenant") if "tenant" in known else "",
        prefix_blocks=record.ids("prefix_blocks") if "prefix_blocks" in known else (),
        output_score=record.number("output_score") if "output_score" in known else None,
        **{field: record.number(field, at_least=0) for field in _SECONDS if field in known},
    )


def capture_lines(requests: Iterable[SimRequest]) -> Iterator[str]:
    """What `parse_capture` reads back as it was; a line each, with its end. Fields at their defaults are left out."""
    for request in requests:
        fields: dict[str, Any] = {
            "request_id": request.request_id,
            "arrival_s": request.arrival_s,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_output_tokens": request.num_output_tokens,
        }
        for name in ("max_tokens", "lane", "tenant", *_SECONDS):
            if value := getattr(request, name):
                fields[name] = value
        if request.prefix_blocks:
            fields["prefix_blocks"] = list(request.prefix_blocks)
        if request.output_score is not None:
            fields["output_score"] = request.output_score
        yield json.dumps(fields) + "\n"
