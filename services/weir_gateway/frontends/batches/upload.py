"""A file that is uploaded as a form, read within bounds; what is large waits on disk."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from weir.core.errors import FieldViolation, InvalidRequest, Overloaded
from weir_gateway.frontends.http_body import BadBody

PURPOSE = "batch"
_FORM_BYTES = 1 << 16  # of all that is not the file
_MAX_FIELDS = 8
_UPLOAD_TIMEOUT_S = 300.0
_MAX_UPLOADS = 4
_READ_BYTES = 1 << 20
_KEPT_RANGE_S = range(3600, 30 * 86_400 + 1)


@dataclass(frozen=True, slots=True)
class Upload:
    """`content` is read once, by a thread. `keeps_s` None: until it is deleted."""

    filename: str
    keeps_s: int | None
    content: Callable[[], Iterator[bytes]]


class UploadReader:
    """So many uploads at once; files of so many bytes."""

    def __init__(self, max_file_bytes: int) -> None:
        self._max_file_bytes = max_file_bytes
        self._num_open = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Upload]:
        """Raises BadBody, InvalidRequest, Overloaded, ClientDisconnect."""
        if self._num_open >= _MAX_UPLOADS:
            raise Overloaded(f"{_MAX_UPLOADS} files are being uploaded; try again", retry_after_s=1.0)
        self._num_open += 1
        try:
            if not request.headers.get("content-type", "").startswith("multipart/form-data"):
                raise BadBody(400, "the body must be multipart/form-data with the fields purpose and file")
            form = await self._parse(request)
            try:
                yield _upload_of(form)
            finally:
                await form.close()
        finally:
            self._num_open -= 1

    async def _parse(self, request: Request) -> FormData:
        try:
            async with asyncio.timeout(_UPLOAD_TIMEOUT_S):
                parser = MultiPartParser(
                    request.headers, self._bounded(request), max_files=1, max_fields=_MAX_FIELDS, max_part_size=1 << 12
                )
                return await parser.parse()
        except MultiPartException as error:
            raise BadBody(400, f"the form cannot be read: {error.message}") from None
        except TimeoutError:
            raise BadBody(408, f"the body took longer than {_UPLOAD_TIMEOUT_S:g} s") from None

    async def _bounded(self, request: Request) -> AsyncGenerator[bytes, None]:
        limit, num_bytes = self._max_file_bytes, 0
        length = request.headers.get("content-length", "0")
        too_large = BadBody(413, f"the file is larger than batch_file_mb: {limit} bytes; make several files of it")
        if length.isdecimal() and int(length) > limit + _FORM_BYTES:
            raise too_large
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > limit + _FORM_BYTES:
                raise too_large
            yield chunk


def _upload_of(form: FormData) -> Upload:
    violations = []
    purpose, file = form.get("purpose"), form.get("file")
    if purpose != PURPOSE:
        violations.append(FieldViolation("purpose", f"is {str(purpose)[:40]!r}; files are kept for {PURPOSE!r} only"))
    keeps_s = _try_int(form.get("expires_after[seconds]"))
    if "expires_after[seconds]" in form and (keeps_s is None or keeps_s not in _KEPT_RANGE_S):
        limit = f"must be from {_KEPT_RANGE_S[0]} to {_KEPT_RANGE_S[-1]} seconds"
        violations.append(FieldViolation("expires_after[seconds]", limit))
    if form.get("expires_after[anchor]", "created_at") != "created_at":
        violations.append(FieldViolation("expires_after[anchor]", "must be created_at"))
    if not isinstance(file, UploadFile):
        violations.append(FieldViolation("file", "is missing; give a file of JSON lines"))
    if violations or not isinstance(file, UploadFile):
        raise InvalidRequest(violations)
    spooled = file.file

    def content() -> Iterator[bytes]:
        spooled.seek(0)
        while data := spooled.read(_READ_BYTES):
            yield data

    name = "".join(char for char in file.filename or "" if char.isprintable())[:255]
    return Upload(name or "batch.jsonl", keeps_s, content)


def _try_int(value: object) -> int | None:
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) <= 9 else None
