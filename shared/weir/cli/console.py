"""How commands speak: results to stdout, everything else to stderr."""

from typing import NoReturn

import typer
from rich.console import Console

from weir.cli import EXIT_FAILED
from weir.core.errors import WeirError
from weir.runtime.extras import Extra, ExtraMissing, check_extra

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


def fail(message: str, *, code: int = EXIT_FAILED) -> NoReturn:
    """Prints one readable line and ends the command."""
    stderr.print("error:", message, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def need_extra(extra: Extra, what: str) -> None:
    """Ends the command in one line, which says how to install it, where an extra of the distribution is missing."""
    try:
        check_extra(extra, what)
    except ExtraMissing as missing:
        fail(missing.message)


def error_line(error: WeirError) -> str:
    """The message, and when to try again where that is known."""
    if error.retry_after_s is None:
        return error.message
    return f"{error.message} (try again in {error.retry_after_s:.1f} s)"


def size_text(num_bytes: int) -> str:
    """As the hub's pages and disks count: in powers of 1000."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
