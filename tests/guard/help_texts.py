"""The commands of the program, and the examples that their help texts give."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import typer.main

from weir.cli.app import app

PROGRAM: Any = typer.main.get_command(app)


class CommandHelp(NamedTuple):
    """`path`: as it is typed, from `weir` on. `examples`: lines for a shell."""

    path: str
    examples: tuple[str, ...]


def all_commands() -> Iterator[CommandHelp]:
    """Every command, and every group of commands."""
    waiting = [("weir", PROGRAM)]
    while waiting:
        path, command = waiting.pop()
        waiting += [(f"{path} {name}", child) for name, child in getattr(command, "commands", {}).items()]
        yield CommandHelp(path, tuple(re.findall(r"^(?:\w+=\S+ )*weir .*$", command.help or "", re.MULTILINE)))


def examples_of_help() -> list[str]:
    return [example for command in all_commands() for example in command.examples]
