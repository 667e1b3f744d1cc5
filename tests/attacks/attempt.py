"""What an attempt is, and the stack that it is made against."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weir.core.credentials import key_digest, make_key
from weir.runtime.stack.paths import InstancePaths
from weir.testing.stack import TINY_MODEL, Stack

_LIMITS = """
admin_key_digests = ["{admin}"]
[tenants.attacker]
api_key_digests = ["{attacker}"]
requests_per_min = 600
[tenants.other]
api_key_digests = ["{other}"]
"""


@dataclass(frozen=True, slots=True)
class Scene:
    """A running stack with two tenants: one attacks, the other is to be served meanwhile."""

    stack: Stack
    attacker_key: str
    other_key: str

    @property
    def paths(self) -> InstancePaths:
        return InstancePaths(self.stack.runtime_dir.resolve() / self.stack.instance)

    @property
    def segment(self) -> Path:
        """The file with the pages of all requests."""
        [found] = [path for path in Path("/dev/shm").iterdir() if self.stack.instance in path.name]
        return found


Trying = Callable[[Scene], Coroutine[Any, Any, str]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """`run` says what became of it, in a word or two: `expected` where it was refused."""

    finding: str
    what: str
    expected: str
    run: Trying
    needs_root: bool = False
    """It acts as another user."""


@contextmanager
def open_scene(folder: Path) -> Iterator[Scene]:
    """Starts a stack, and ends it. Bounds are small, so that they are reached with few requests."""
    admin, attacker, other = make_key(), make_key(), make_key()
    digests = {"admin": key_digest(admin), "attacker": key_digest(attacker), "other": key_digest(other)}
    limits = folder / "limits.toml"
    limits.write_text(_LIMITS.format(**{name: digest.hex() for name, digest in digests.items()}))
    environ = {"WEIR_MAX_REQUESTS": "32"}
    with Stack(folder / "run", flags=(*TINY_MODEL, "--limits-file", str(limits)), environ=environ) as stack:
        yield Scene(stack, attacker, other)
