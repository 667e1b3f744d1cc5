"""Starts the whole stack in containers, asks it, kills its processes and ends it: `make compose-test`.

Needs root, Debian with apt, Python 3.11, 8 GB of disk below build/containers (kept for the next run; `make clean` takes
it) and 4 GB of memory. Ends with 1 and the reason where something was not as it should be, or something is left.
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import httpx
from tests.containers.chart_pods import ChartPods
from tests.containers.checks import Seen, Wrong
from tests.containers.engine import CommandFailed, Engine
from tests.containers.images import Images, Names
from tests.containers.leftovers import HostBefore, in_docker, on_host
from tests.containers.packages import get_tools
from tests.containers.parts import Part, WholeStack, WithCertificates
from tests.containers.report import Circumstances, load_now, write_report
from tests.containers.stack import ROOT, WHOLE, ComposeStack, Ports
from tests.containers.two_hosts import TwoHosts

CACHE = ROOT / "build" / "containers"
PARTS: dict[str, Part] = {part.name: part for part in (WholeStack(), WithCertificates(), TwoHosts(), ChartPods())}
_LOCK_HINT = "another run uses it: wait until it has ended"


class Run:
    """One run: what it has seen so far, each line printed as it comes."""

    def __init__(self, part: Part, engine: Engine, stack: ComposeStack, images: Images) -> None:
        self._part = part
        self._engine = engine
        self._stack = stack
        self._images = images
        self._began_s = time.monotonic()
        self.seen: list[Seen] = []

    def note(self, *seen: Seen) -> None:
        self.seen += seen
        for one in seen:
            self.say(f"{one.done}: {one.seen}")

    def say(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._began_s:7.1f} s  {text}\n")
        sys.stdout.flush()

    def timed(self, done: str, act: Callable[[], object], seen: str) -> None:
        self.say(f"{done} …")
        began_s = time.monotonic()
        act()
        self.note(Seen(done, f"{seen} {time.monotonic() - began_s:.0f} s"))

    def all(self) -> None:
        """Raises what the first thing that was wrong raised."""
        self.timed("base images", self._images.make_bases, "made, or found from an earlier run:")
        build = f"`docker compose -f {WHOLE} build`"
        self.timed(build, self._images.make_weir, "weir:local of this tree, built or found:")
        size_bytes = int(self._engine.docker("image", "inspect", "--format", "{{.Size}}", "weir:local"))
        base_bytes = int(self._engine.docker("image", "inspect", "--format", "{{.Size}}", self._images.base))
        self.note(Seen("size of the image without its base", f"{(size_bytes - base_bytes) / 1e9:.1f} GB"))
        self._images.make_trace_store()
        self._part.before_up(self._stack)
        self.timed(f"`{self._stack.command} up -d --wait`", self._stack.up, self._part.healthy)
        for seen in self._part.check(self._stack):
            self.note(seen)

    def end(self) -> list[str]:
        """Brings the stack down; what Docker still has then, which is removed all the same."""
        began_s = time.monotonic()
        try:
            self._stack.down()
            left = in_docker(self._engine)
        except CommandFailed as error:
            left = [f"down: {error}"]
        self._engine.sweep()
        if not left:
            took_s = time.monotonic() - began_s
            self.note(
                Seen(
                    f"`{self._stack.command} down -v`",
                    f"no container, volume or network left: {took_s:.0f} s",
                )
            )
        return left


@contextlib.contextmanager
def lock(cache: Path) -> Iterator[TextIO]:
    """Of the images; raises BlockingIOError."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"{cache}: {_LOCK_HINT}") from error
        yield file


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Cleaning up is not to be broken off by a second Ctrl-C."""
    old = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def rehearse(part: Part, report: Path) -> int:
    """A run. Raises what was wrong, with everything ended all the same."""
    tools = get_tools(CACHE)
    before, ports, load_before = HostBefore.now(), Ports.free(), load_now()
    folder = Path(tempfile.mkdtemp(prefix="weir-compose-"))
    engine = Engine(tools, folder, CACHE / "docker")
    left: list[str] = []
    try:
        with engine:
            engine.sweep()  # of a run that was killed
            environ = part.prepare(folder)
            stack = ComposeStack(engine, ports, part.files, environ, part.left_out)
            whole = ComposeStack(engine, ports)
            images = Images(engine, tools, Names.of(whole.document()), whole.build)
            run = Run(part, engine, stack, images)
            versions = engine.version(), stack.version()
            with ended(run, stack, engine, left):
                run.all()
    finally:
        with uninterrupted():
            shutil.rmtree(folder)
            left += on_host(before, engine, ports.all)
            if left:
                sys.stderr.write("left behind:\n" + "\n".join(left) + "\n")
    if left:
        return 1
    run.note(Seen("after dockerd has ended", "no process, mount, network interface, cgroup or listener of it is left"))
    command = "make compose-test" if isinstance(part, WholeStack) else f"make compose-test PART={part.name}"
    of = Circumstances(command, *versions, load_before, load_now(), images.stand_ins())
    write_report(report, run.seen, of)
    return 0


@contextlib.contextmanager
def ended(run: Run, stack: ComposeStack, engine: Engine, left: list[str]) -> Iterator[None]:
    """Brings all down after the block, whatever happened in it; adds to `left` what Compose has left in Docker."""
    try:
        yield
    except BaseException:
        with uninterrupted(), contextlib.suppress(CommandFailed):
            (CACHE / "failed.log").write_text(stack.logs())
            sys.stderr.write(f"the containers' last lines are in {CACHE / 'failed.log'}\n")
        raise
    finally:
        with uninterrupted():
            left += run.end()
            engine.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default=WholeStack.name, help="What is started.")
    parser.add_argument("--out", type=Path, help="The report. Default: in shared/docs/results.")
    arguments = parser.parse_args()
    name = "compose-test" if arguments.part == WholeStack.name else f"compose-{arguments.part}"
    report = arguments.out or ROOT / f"shared/docs/results/{name}.md"
    if os.geteuid() != 0:
        sys.stderr.write("make compose-test starts a container engine: it needs root\n")
        return 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with lock(CACHE):
            return rehearse(PARTS[arguments.part], report)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except (
        Wrong,
        CommandFailed,
        TimeoutError,
        subprocess.SubprocessError,
        httpx.HTTPError,
        RuntimeError,
        OSError,
    ) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
