"""Where compiled kernels lie, and what was found out about this machine."""

import os
from pathlib import Path


def kernels_folder() -> Path:
    """`$WEIR_CACHE/kernels`, by default in `~/.cache/weir`."""
    return Path(os.environ.get("WEIR_CACHE") or Path.home() / ".cache" / "weir") / "kernels"
