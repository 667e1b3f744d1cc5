"""What a command imports before it does anything."""

import json
import subprocess
import sys

import pytest
from typer.main import get_group

from weir.cli.app import app

_RUN = """
import json, sys
from weir.cli.main import main
sys.argv = ["weir", *sys.argv[1:], "--help"]
try:
    main()
finally:
    print(json.dumps([*sys.modules]))
"""


def imported_by(*words: str) -> set[str]:
    command = [sys.executable, "-c", _RUN, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {*json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        (("pull",), "weir.cli.pull", {"weir.cli.stack.up", "grpc", "nats"}),
        (("limits", "set"), "weir.cli.scheduling", {"weir.cli.stack.up", "weir.cli.chat"}),
        (("serve",), "weir.cli.app", {"weir.cli.stack.up", "grpc", "nats"}),
    ],
)
def test_a_command_imports_no_other(words: tuple[str, ...], own: str, others: set[str]) -> None:
    found = imported_by(*words)
    assert own in found
    assert found & others == set()


def test_every_command_is_in_its_place_and_no_other() -> None:
    commands = get_group(app).commands
    assert len(commands) == 26
    assert [command.name for command in commands.values()] == [*commands]
    assert "nothing" not in commands
