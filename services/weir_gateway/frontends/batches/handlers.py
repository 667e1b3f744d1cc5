"""`/v1/files` and `/v1/batches`, as OpenAI has them."""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from weir.core.errors import FieldViolation, InvalidRequest, NotFound
from weir_gateway.access import Caller
from weir_gateway.batches.files import PageAsked
from weir_gateway.batches.jobs import BatchJobs, jobs_of
from weir_gateway.batches.lines import ENDPOINTS
from weir_gateway.batches.records import NewBatch
from weir_gateway.frontends.batches.upload import UploadReader
from weir_gateway.frontends.http_app import CallerRoute
from weir_gateway.frontends.http_body import BodyReader
from weir_gateway.frontends.openai.schema import parse_body

_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_PURPOSES = ("", "batch", "batch_output")
_MAX_WINDOW_S = 30 * 86_400
_MAX_METADATA = 16
_MAX_METADATA_CHARS = 512
_MAX_FILES_OF_PAGE = 10_000
_MAX_BATCHES_OF_PAGE = 100


class BatchBody(BaseModel):
    """What `POST /v1/batches` takes."""

    model_config = ConfigDict(extra="ignore", strict=True)

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class BatchesApi:
    """Handlers for callers that are known. They raise WeirError, and BadBody. `jobs` None: switched off."""

    def __init__(self, bodies: BodyReader, jobs: BatchJobs | None) -> None:
        self._bodies = bodies
        self._jobs = jobs
        self._uploads = UploadReader(jobs.settings.max_file_bytes if jobs is not None else 0)

    def routes(self) -> Sequence[CallerRoute]:
        return (
            ("POST", "/v1/files", self.upload),
            ("GET", "/v1/files", self.files),
            ("GET", "/v1/files/{file_id}", self.file),
            ("GET", "/v1/files/{file_id}/content", self.content),
            ("DELETE", "/v1/files/{file_id}", self.delete_file),
            ("POST", "/v1/batches", self.create),
            ("GET", "/v1/batches", self.batches),
            ("GET", "/v1/batches/{batch_id}", self.batch),
            ("POST", "/v1/batches/{batch_id}/cancel", self.cancel),
        )

    async def upload(self, request: Request, caller: Caller) -> Response:
        jobs = jobs_of(self._jobs)
        async with self._uploads.read(request) as upload:
            name, content = upload.filename, upload.content()
            made = await jobs.database.run(jobs.files.add, caller.tenant, name, "batch", content, upload.keeps_s)
        return JSONResponse(made.json())

    async def files(self, request: Request, caller: Caller) -> Response:
        jobs = jobs_of(self._jobs)
        asked = _page_asked(request.query_params, _MAX_FILES_OF_PAGE, default=_MAX_FILES_OF_PAGE)
        purpose = request.query_params.get("purpose", "")
        if purpose not in _PURPOSES:
            raise InvalidRequest([FieldViolation("purpose", f"is {purpose[:40]!r}; must be one of {_PURPOSES[1:]}")])
        found, has_more = await jobs.database.run(jobs.files.page, caller.tenant, asked, purpose)
        return _list([one.json() for one in found], has_more)

    async def file(self, request: Request, caller: Caller) -> Response:
        jobs = jobs_of(self._jobs)
        found = await jobs.database.run(jobs.files.get, caller.tenant, _id_of(request, "file_id"))
        return JSONResponse(found.json())

    async def content(self, request: Request, caller: Caller) -> Response:
        jobs = jobs_of(self._jobs)
        found = await jobs.database.run(jobs.files.get, caller.tenant, _id_of(request, "file_id"))

        async def parts() -> AsyncIterator[bytes]:
            part = 0
            while (data := await jobs.database.run(jobs.files.try_part, found.file_id, part)) is not None:
                yield data
                part += 1

        headers = {"Content-Length": str(found.num_bytes)}  # a file that is cut short is told from a whole one
        return StreamingResponse(parts(), headers=headers, media_type="application/octet-stream")

    async def delete_file(self, request: Request, caller: Caller) -> Response:
        jobs, file_id = jobs_of(self._jobs), _id_of(request, "file_id")
        await jobs.database.run(jobs.files.delete, caller.tenant, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def create(self, request: Request, caller: Caller) -> Response:
        jobs = jobs_of(self._jobs)
        asked = await self._bodies.read(
            request, caller, lambda raw: _new_batch(parse_body(BatchBody, raw), caller.tenant)
        )
        made = await jobs.database.run(jobs.batches.create, asked)
        jobs.runner.wake()
        return JSONResponse(made.json())

    async def batches(self, request: Request, caller: Caller) -> Response:
        jobs = jobs_of(self._jobs)
        asked = _page_asked(request.query_params, _MAX_BATCHES_OF_PAGE, default=20)
        found, has_more = await jobs.database.run(jobs.batches.page, caller.tenant, asked)
        return _list([one.json() for one in found], has_more)

    async def batch(self, request: Request, caller: Caller) -> Response:
        jobs = jobs_of(self._jobs)
        found = await jobs.database.run(jobs.batches.get, caller.tenant, _id_of(request, "batch_id"))
        return JSONResponse(found.json())

    async def cancel(self, request: Request, caller: Caller) -> Response:
        jobs = jobs_of(self._jobs)
        found = await jobs.database.run(jobs.batches.cancel, caller.tenant, _id_of(request, "batch_id"))
        jobs.runner.wake()
        return JSONResponse(found.json())


def _id_of(request: Request, field: str) -> str:
    """Raises NotFound."""
    return _known_form(request.path_params[field], field)


def _known_form(text: str, field: str) -> str:
    """No other has ever been given, and not every text is one that a database can be asked for. Raises NotFound."""
    if _ID.fullmatch(text) is None:
        raise NotFound(field, f"{field}: there is no {text[:80]!r}")
    return text


def _new_batch(body: BatchBody, tenant: str) -> NewBatch:
    violations = []
    if body.endpoint not in ENDPOINTS:
        known = " and ".join(ENDPOINTS)
        violations.append(FieldViolation("endpoint", f"is {body.endpoint[:80]!r}; batches are for {known}"))
    match = _WINDOW.fullmatch(body.completion_window)
    window_s = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 1 <= window_s <= _MAX_WINDOW_S:
        limit = "must be a number and s, m, h or d, from 1s to 30d, such as 24h"
        violations.append(FieldViolation("completion_window", f"is {body.completion_window[:40]!r}; {limit}"))
    metadata = body.metadata or {}
    if len(metadata) > _MAX_METADATA or any(
        len(text) > _MAX_METADATA_CHARS for pair in metadata.items() for text in pair
    ):
        limit = f"has at most {_MAX_METADATA} entries, of {_MAX_METADATA_CHARS} characters"
        violations.append(FieldViolation("metadata", limit))
    if violations:
        raise InvalidRequest(violations)
    file_id = _known_form(body.input_file_id, "input_file_id")
    return NewBatch(tenant, body.endpoint, file_id, window_s, body.completion_window, body.metadata)


def _page_asked(query: Mapping[str, str], max_limit: int, *, default: int) -> PageAsked:
    """Raises InvalidRequest."""
    limit, order, after = query.get("limit", str(default)), query.get("order", "desc"), query.get("after", "")
    if not (limit.isdecimal() and len(limit) <= 6 and 1 <= int(limit) <= max_limit):
        raise InvalidRequest([FieldViolation("limit", f"is {limit[:40]!r}; must be from 1 to {max_limit}")])
    if order not in ("asc", "desc"):
        raise InvalidRequest([FieldViolation("order", f"is {order[:40]!r}; must be asc or desc")])
    if after and _ID.fullmatch(after) is None:
        raise InvalidRequest([FieldViolation("after", f"there is no {after[:80]!r}; give the id of a last entry")])
    return PageAsked(after, int(limit), order == "desc")


def _list(entries: Sequence[dict[str, Any]], has_more: bool) -> Response:
    ids = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]} if entries else {}
    return JSONResponse(
        {"object": "list", "data": entries, "first_id": None, "last_id": None, "has_more": has_more} | ids
    )
