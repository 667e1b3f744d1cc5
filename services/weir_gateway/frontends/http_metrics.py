"""`GET /metrics`, for whoever may use the other routes. A key of one tenant must not show another's use: there are no
figures by tenant."""

from starlette.requests import Request
from starlette.responses import Response

from weir.telemetry.exposition import is_openmetrics
from weir_gateway.access import Caller
from weir_gateway.metrics.metrics_page import MetricsPage


async def metrics_response(page: MetricsPage, request: Request, caller: Caller) -> Response:
    """The same for every caller."""
    del caller
    made = await page.page(as_openmetrics=is_openmetrics(request.headers.get("accept", "")))
    return Response(made.content, headers={"Content-Type": made.content_type, "Cache-Control": "no-store"})
