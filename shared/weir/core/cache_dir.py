"""Where Weir keeps what it can make again: models, packed weights, compiled kernels."""

import os
from collections.abc import Mapping
from pathlib import Path

from weir.core.trusted_folder import make_trusted_folder


def cache_dir() -> Path:
    """`$WEIR_CACHE`, or `~/.cache/weir`."""
    configured = os.environ.get("WEIR_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "weir"


def kernels_dir() -> Path:
    """Of compiled kernels in it. It is there, and this user's alone: what is loaded from it is run.

    Raises UntrustedFolder.
    """
    folder = cache_dir() / "kernels"
    make_trusted_kernels(folder)
    return folder


def check_kernels() -> None:
    """`kernels_dir`, and of each instruction set and version what is in it. Raises UntrustedFolder."""
    for folder in kernels_dir().iterdir():
        make_trusted_kernels(folder)


def make_trusted_kernels(folder: Path) -> None:
    """Of `kernels_dir`, or in it. Raises UntrustedFolder."""
    make_trusted_folder(folder, cache_dir(), "set WEIR_CACHE to a folder of your own")


def check_triton_cache(environ: Mapping[str, str]) -> None:
    """Triton loads from it what it runs, in this process and on the GPU. Raises UntrustedFolder."""
    home = Path(environ.get("TRITON_HOME") or Path.home())
    folder = Path(environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    make_trusted_folder(folder, folder, "set TRITON_CACHE_DIR to a folder of your own")
