"""How a benchmark ends: with its report as tables or JSON, or with a line that says what it lacks."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from rich.console import Console
from rich.table import Table

R = TypeVar("R")
_WIDEST = 1000


def run_and_print(
    command: str,
    measure: Callable[[], R],
    *,
    as_dict: Callable[[R], Mapping[str, object]],
    tables: Callable[[R], Iterable[Table | str]],
    json_output: bool,
    errors: tuple[type[Exception], ...] = (),
) -> int:
    """Returns the exit code: 1 if `measure` raised one of `errors`, which say what it lacks. Anything else is a defect,
    and raised on."""
    try:
        report = measure()
    except errors as error:
        Console(stderr=True).print(f"{command}: {error}", markup=False, highlight=False)
        return 1
    if json_output:
        print(json.dumps(as_dict(report), indent=2))
    else:
        for table in tables(report):
            if isinstance(table, str):
                print(table)
            else:
                _print_whole(table)
    return 0


def _print_whole(table: Table) -> None:
    """On lines longer than the terminal, if need be: a figure that is cut is none."""
    console = Console()
    least = console.measure(table, options=console.options.update(max_width=_WIDEST)).minimum
    console.width = max(console.width, least)
    console.print(table)
