"""Where Weir keeps what it can make again: models, packed weights, compiled kernels."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$WEIR_CACHE`, or `~/.cache/weir`."""
    configured = os.environ.get("WEIR_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "weir"
