"""The distribution's extras: what each part of Weir needs beside the plain install, and what to say where it lacks."""

import importlib.util
from collections.abc import Mapping
from typing import Literal

from weir.runtime.config import ConfigError

DISTRIBUTION = "weir-llm"

Extra = Literal["worker", "certs", "plots", "postgres", "training", "valkey"]
PACKAGES: Mapping[Extra, tuple[str, ...]] = {
    "worker": ("torch", "numba"),
    "certs": ("cryptography",),
    "plots": ("matplotlib",),
    "postgres": ("psycopg",),
    "training": ("torch", "sklearn", "scipy"),
    "valkey": ("redis",),
}
"""Import names. Triton is asked for by the devices that run it."""


class ExtraMissing(ConfigError):
    """A package is not installed; says what needs it, and the command that installs it."""


def check_extra(extra: Extra, what: str) -> None:
    """Imports nothing. Raises ExtraMissing if a package that `what` needs is not installed."""
    missing = [name for name in PACKAGES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise ExtraMissing(f"{what} needs {names}, which this install lacks: {install_command(extra)}")


def install_command(extra: Extra) -> str:
    return f"pip install '{DISTRIBUTION}[{extra}]'"
