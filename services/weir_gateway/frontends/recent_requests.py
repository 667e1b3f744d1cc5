"""What operators ask of the requests that a gateway remembers: a list of them, or one with all of its phases.

GET /debug/requests        ?limit= &order=newest|slowest &life= &tenant= &lane= &model= &min_ms=
GET /debug/requests/ID
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from weir.core.errors import FieldViolation, InvalidRequest
from weir.telemetry.request_record import RequestList, RequestRecord
from weir_gateway.recent.store import RecentRequests, RequestFilter

_ANSWER_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)([0-9a-f]{32})")
_JSON = "application/json"
_NO_STORE = {"Cache-Control": "no-store"}
_LIST: TypeAdapter[RequestList] = TypeAdapter(RequestList)
_RECORD: TypeAdapter[RequestRecord] = TypeAdapter(RequestRecord)
_Name = Annotated[str, Field(max_length=256)]


class RequestQuery(BaseModel):
    """The query of a list."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=200)] = 50
    order: Literal["newest", "slowest"] = "newest"
    life: Literal["", "running", "finished", "cancelled", "failed", "refused"] = ""
    tenant: _Name = ""
    lane: _Name = ""
    model: _Name = ""
    min_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class RecentRequestsApi:
    """Handlers for operators. They raise WeirError."""

    def __init__(self, recent: RecentRequests) -> None:
        self._recent = recent

    async def list_requests(self, request: Request) -> Response:
        wanted = _filter_of(request.query_params)
        return Response(_LIST.dump_json(self._recent.list_requests(wanted)), media_type=_JSON, headers=_NO_STORE)

    async def request(self, request: Request) -> Response:
        found = self._recent.find(_plain_id(request.path_params["request_id"]))
        return Response(_RECORD.dump_json(found), media_type=_JSON, headers=_NO_STORE)


def _filter_of(query: Mapping[str, str]) -> RequestFilter:
    """Raises InvalidRequest."""
    try:
        asked = RequestQuery.model_validate(dict(query))
    except ValidationError as error:
        violations = [
            FieldViolation(".".join(map(str, one["loc"]))[:100] or "query", one["msg"][:200]) for one in error.errors()
        ]
        raise InvalidRequest(violations) from None
    return RequestFilter(asked.tenant, asked.lane, asked.model, asked.life, asked.min_ms, asked.order, asked.limit)


def _plain_id(shown: str) -> str:
    """The ids of answers have a word before the request's: `chatcmpl-…`, `msg_…`."""
    match = _ANSWER_ID.fullmatch(shown)
    return match[1] if match else shown
