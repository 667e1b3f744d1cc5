"""Who may ask for which path of the HTTP port: one table, and what is not in it is refused.

The routes' endpoints are chosen by it, and the OpenAPI document says the same. That of the gRPC methods, and what the
kinds of callers are, is in `weir.rpc.access`.
"""

import re
from collections.abc import Mapping

from weir.rpc.access import Callers

_OPEN, _TENANT, _OPERATOR = Callers.OPEN, Callers.TENANT, Callers.OPERATOR
_PARAMETER = re.compile(r"\{[^}]*\}")

HTTP_CALLERS: Mapping[tuple[str, str], Callers] = {
    ("POST", "/v1/chat/completions"): _TENANT,
    ("POST", "/v1/completions"): _TENANT,
    ("POST", "/v1/responses"): _TENANT,
    ("GET", "/v1/responses/{}"): _TENANT,
    ("DELETE", "/v1/responses/{}"): _TENANT,
    ("POST", "/v1/messages"): _TENANT,
    ("POST", "/v1/messages/count_tokens"): _TENANT,
    ("POST", "/v1/files"): _TENANT,
    ("GET", "/v1/files"): _TENANT,
    ("GET", "/v1/files/{}"): _TENANT,
    ("GET", "/v1/files/{}/content"): _TENANT,
    ("DELETE", "/v1/files/{}"): _TENANT,
    ("POST", "/v1/batches"): _TENANT,
    ("GET", "/v1/batches"): _TENANT,
    ("GET", "/v1/batches/{}"): _TENANT,
    ("POST", "/v1/batches/{}/cancel"): _TENANT,
    ("GET", "/v1/models"): _TENANT,
    ("GET", "/v1/models/{}"): _TENANT,
    ("POST", "/tokenize"): _TENANT,
    ("POST", "/detokenize"): _TENANT,
    ("GET", "/version"): _TENANT,
    ("GET", "/load"): _TENANT,
    ("GET", "/metrics"): _TENANT,  # what scrapes has a tenant's key
    ("GET", "/debug/requests"): _OPERATOR,
    ("GET", "/debug/requests/{}"): _OPERATOR,
    ("GET", "/debug/stack"): _OPERATOR,
    ("GET", "/debug/stack/events"): _OPERATOR,
    ("GET", "/debug/steps"): _OPERATOR,
    ("GET", "/debug/pages"): _OPERATOR,
    # For probes, which have no key, and nothing of any caller's is in the answers.
    ("GET", "/health"): _OPEN,
    ("GET", "/ping"): _OPEN,
    ("POST", "/ping"): _OPEN,
    ("GET", "/openapi.json"): _OPEN,
    ("GET", "/docs"): _OPEN,
    # What the console shows it asks for with the key of who looks.
    ("GET", "/console"): _OPEN,
    ("GET", "/console/api.js"): _OPEN,
    ("GET", "/console/console.css"): _OPEN,
    ("GET", "/console/console.js"): _OPEN,
    ("GET", "/console/dom.js"): _OPEN,
    ("GET", "/console/icon.svg"): _OPEN,
    ("GET", "/console/memory.js"): _OPEN,
    ("GET", "/console/playground.js"): _OPEN,
    ("GET", "/console/requests.js"): _OPEN,
    ("GET", "/console/stack.js"): _OPEN,
}


def http_callers_of(method: str, path: str) -> Callers | None:
    """`path` as a route or the document writes it: whatever its parameters are called. None: nobody may."""
    return HTTP_CALLERS.get((method, _PARAMETER.sub("{}", path)))
