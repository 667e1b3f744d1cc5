"""`GET /metrics`: open to whoever is on the gateway's own machine, to all others as every route is.

On the machine means: over the loopback interface, not passed on by a proxy there, and not asked by a name, which a web
page in somebody's browser could have pointed here. Figures by tenant are for those alone.
"""

from ipaddress import ip_address

from starlette.requests import Request
from starlette.responses import Response

from weir.telemetry.exposition import is_openmetrics
from weir_gateway.access import Caller
from weir_gateway.metrics.metrics_page import MetricsPage

_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-real-ip")


async def metrics_response(page: MetricsPage, request: Request, caller: Caller) -> Response:
    """For whoever may see it."""
    del caller
    as_openmetrics = is_openmetrics(request.headers.get("accept", ""))
    made = await page.page(as_openmetrics=as_openmetrics, with_tenants=is_on_this_machine(request))
    return Response(made.content, headers={"Content-Type": made.content_type, "Cache-Control": "no-store"})


def is_on_this_machine(request: Request) -> bool:
    client, headers = request.client, request.headers
    if client is None or not _is_loopback(client.host) or any(name in headers for name in _OF_PROXIES):
        return False
    host = request.url.hostname or ""
    return host == "localhost" or _is_address(host)


def _is_loopback(host: str) -> bool:
    if not _is_address(host):
        return False
    address = ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _is_address(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
