"""The console's files as they are in the package: plain HTML, CSS and ES modules, which load nothing from elsewhere.

Nothing of anybody's is in them, so that they are open; what they show, they ask for with the key of who looks.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import resources

from starlette.responses import Response

CONSOLE_PATH = "/console"
_MEDIA_TYPES: Mapping[str, str] = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_INDEX = "index.html"
_HEADERS: Mapping[str, str] = {
    # No inline script or style, nothing from another origin, and no text that becomes HTML.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def console_files() -> dict[str, Callable[[], Response]]:
    """By path. Read once, at the start."""
    found: dict[str, Callable[[], Response]] = {}
    for entry in resources.files("weir_gateway.frontends.console").joinpath("page").iterdir():
        media_type = _MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if media_type is None:
            continue
        path = CONSOLE_PATH if entry.name == _INDEX else f"{CONSOLE_PATH}/{entry.name}"
        found[path] = partial(Response, entry.read_bytes(), headers=_HEADERS, media_type=media_type)
    return found
