"""What gateways remember of their last requests, asked over HTTP. Whichever has a request answers for it."""

from collections.abc import Sequence
from types import TracebackType
from typing import Literal, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from weir.core.credentials import key_metadata
from weir.core.errors import InternalError, NotFound, PermissionDenied, Unauthenticated, Unavailable, WeirError
from weir.rpc.tls.public import https_context
from weir.telemetry.request_record import RequestList, RequestRecord

_TIMEOUT_S = 10.0
_MAX_SHOWN_CHARS = 300
_LIST: TypeAdapter[RequestList] = TypeAdapter(RequestList)
_RECORD: TypeAdapter[RequestRecord] = TypeAdapter(RequestRecord)
_FormT = TypeVar("_FormT")

Order = Literal["newest", "slowest"]


class RecentRequestsClient:
    """Every method raises an error of `weir.core.errors`. A gateway that does not answer is left out while another
    does."""

    def __init__(self, gateway_urls: Sequence[str], *, admin_key: str = "", ca: str = "") -> None:
        """`http://HOST:PORT` of each gateway. `admin_key`: needed where anybody has keys. `ca`: a file with the
        authorities of their certificates.

        Raises ValueError for a key that no header can carry, CertificateError.
        """
        self._urls = [url.rstrip("/") for url in gateway_urls]
        # of the stack itself: no proxy is asked
        headers = dict(key_metadata(admin_key))
        self._http = httpx.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=https_context(ca))

    def find(self, request_id: str) -> RequestRecord:
        """By its id or by what its client called it. Raises NotFound if no gateway remembers it."""
        return self._first(f"/debug/requests/{quote(request_id, safe='')}", request_id)

    def first(self, order: Order) -> RequestRecord:
        """The newest, or the slowest, of all gateways. Raises NotFound if none remembers any."""
        lists, error = [], None
        for url in self._urls:
            try:
                lists.append((url, self._ask(url, "/debug/requests", _LIST, order=order, limit="1")))
            except Unavailable as unavailable:
                error = unavailable
        found = [(url, summary) for url, listed in lists for summary in listed.requests]
        if not found:
            raise error or NotFound("request_id", "no gateway remembers any request yet")
        url, summary = max(found, key=lambda one: one[1].received_at_s if order == "newest" else one[1].duration_ms)
        return self._ask(url, f"/debug/requests/{summary.request_id}", _RECORD)

    def _first(self, path: str, request_id: str) -> RequestRecord:
        errors: list[WeirError] = []
        for url in self._urls:
            try:
                return self._ask(url, path, _RECORD)
            except (NotFound, Unavailable) as error:
                errors.append(error)
        if any(isinstance(error, Unavailable) for error in errors):
            raise next(error for error in errors if isinstance(error, Unavailable))
        raise NotFound("request_id", f"request {request_id[:100]!r} is not among those that the gateways remember")

    def _ask(self, url: str, path: str, form: TypeAdapter[_FormT], **query: str) -> _FormT:
        try:
            response = self._http.get(f"{url}{path}", params=query)
        except httpx.HTTPError as error:
            raise Unavailable(f"the gateway at {url} does not answer: {error}") from error
        if response.status_code != httpx.codes.OK:
            raise _refusal(url, response)
        try:
            return form.validate_json(response.content)
        except ValidationError as error:
            raise InternalError(f"the gateway at {url} is of another version: {error.errors()[0]['msg']}") from error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "RecentRequestsClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refusal(url: str, response: httpx.Response) -> WeirError:
    try:
        message = str(response.json()["error"]["message"])[:_MAX_SHOWN_CHARS]
    except (ValueError, KeyError, TypeError):
        message = f"the gateway at {url} answers with status {response.status_code}"
    if response.status_code == httpx.codes.NOT_FOUND:
        return NotFound("request_id", message)
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return Unauthenticated(message)
    if response.status_code == httpx.codes.FORBIDDEN:
        return PermissionDenied(message)
    return Unavailable(message) if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR else InternalError(message)
