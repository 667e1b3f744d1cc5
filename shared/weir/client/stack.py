"""The state of a whole stack, as a gateway tells operators over HTTP."""

import httpx
from pydantic import TypeAdapter, ValidationError

from weir.core.errors import InternalError, PermissionDenied, Unauthenticated, Unavailable, WeirError
from weir.rpc.tls.public import https_context
from weir.telemetry.stack_snapshot import StackSnapshot

_SNAPSHOT: TypeAdapter[StackSnapshot] = TypeAdapter(StackSnapshot)
_REFUSALS: dict[int, type[WeirError]] = {401: Unauthenticated, 403: PermissionDenied}
_MAX_SHOWN_CHARS = 300


class StackClient:
    """Of one gateway. To be closed."""

    def __init__(self, url: str, *, admin_key: str = "", timeout_s: float = 5.0, ca: str = "") -> None:
        """`url`: http[s]://HOST:PORT. `ca`: as `weir.client.WeirClient`. Raises CertificateError."""
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        verify = https_context(ca)
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout_s, verify=verify)

    async def snapshot(self) -> StackSnapshot:
        """Raises Unavailable where nobody answers, and what the gateway refuses with."""
        try:
            response = await self._http.get("/debug/stack")
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url} does not answer ({type(error).__name__})") from error
        if response.status_code != 200:
            refusal = _REFUSALS.get(response.status_code, Unavailable)
            raise refusal(_message_of(response))
        try:
            return _SNAPSHOT.validate_json(response.content)
        except ValidationError as error:
            what = f"{error.error_count()} fields of its answer are not as this Weir reads them"
            raise InternalError(f"{self.url} is a gateway of another version: {what}") from error

    async def close(self) -> None:
        await self._http.aclose()


def _message_of(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:_MAX_SHOWN_CHARS]
    except (ValueError, KeyError, TypeError):
        return f"{response.url} is answered with status {response.status_code}: is a gateway there?"
