"""Ctrl-C while `weir` itself is still being loaded. The tests may run in the background, which ignores it."""

import subprocess
import sys

import pytest

INTERRUPTED_WHILE_LOADING = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt as error:
                raise ImportError("as extensions make of it") from error

sys.meta_path.insert(0, Interrupts())
{before}
from weir.cli.main import main
sys.argv = ["weir", "pull", "--help"]
main()
"""


@pytest.mark.parametrize(
    ("before", "returncode", "has_help"),
    [
        ("signal.signal(signal.SIGINT, signal.default_int_handler)", 130, False),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)", 0, True),
    ],
    ids=["as a terminal starts it", "in the background of a script"],
)
@pytest.mark.parametrize("module", ["typer", "weir.cli.pull"])
def test_a_command_that_is_interrupted_while_it_loads_ends_quietly(
    module: str, before: str, returncode: int, has_help: bool
) -> None:
    code = INTERRUPTED_WHILE_LOADING.format(module=module, before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (returncode, "")
    assert ("Usage: weir pull" in done.stdout) is has_help


def test_once_it_is_loaded_an_interrupt_reaches_the_command() -> None:
    """Whose clean-up must run."""
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from weir.cli import main, pull

def cleans() -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        print("clean")

pull.pull = cleans
sys.argv = ["weir", "pull"]
main.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "clean\n", "")
