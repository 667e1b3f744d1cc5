"""What clients of a stack of two hosts see of its pages and its drains: `python -m tests.hosts.measure`, as root.

prefix  time to the first token of 900 tokens of prompt: all but the end cached at the other host, computed, cached
drain   of 16 streams the longest wait between two tokens, while one of the hosts is drained; the command is loaded
        before they begin, since its start takes a second of one of the two processors that all of this shares
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.hosts.streams import Asked, Read, Streams
from tests.hosts.two_hosts import RUNTIME, TIMEOUT_S, TwoHosts, open_two_hosts

from weir.testing.stack import wait_until

_NUM_STREAMS, _NUM_ROUNDS, _STORY_TOKENS = 16, 4, 400
_LOADED_COMMAND = """
import sys
import weir.cli.app
from weir.cli.main import main
print("loaded", flush=True)
sys.stdin.readline()
main()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, open_two_hosts(Path(folder), _NUM_STREAMS) as two:
        two.start(two.b)
        wait_until(lambda: two.num_workers() == 4, timeout_s=TIMEOUT_S, what="both hosts' workers are known")
        _measure_prefixes(two)
        _measure_drains(two)


def _measure_prefixes(two: TwoHosts) -> None:
    _drain(two, "b", "--grace-s", "0", "--wait")
    for number in range(_NUM_ROUNDS):
        _first_token_ms(two, _long(number))
    _drain(two, "b", "--undo")
    _drain(two, "a", "--grace-s", "0", "--wait")
    _first_token_ms(two, "Hello")
    found = [
        (
            _first_token_ms(two, f"{_long(number)} What is {number}?"),
            _first_token_ms(two, f"{_long(100 + number)} What is {number}?"),
            _first_token_ms(two, f"{_long(number)} And what is {number}?"),
        )
        for number in range(_NUM_ROUNDS)
    ]
    _drain(two, "a", "--undo")
    for what, values in zip(("fetched", "computed", "cached"), zip(*found, strict=True), strict=True):
        print(f"first token, {what}: {median(values):.0f} ms ({min(values):.0f} to {max(values):.0f})")


def _measure_drains(two: TwoHosts) -> None:
    """In turns: a drain that interrupts its streams, which are computed again elsewhere, and one that lets them
    migrate. Each with stories that nobody has told before, and told again after it."""
    for number in range(_NUM_ROUNDS):
        for what, flags in (("interrupted", ("--grace-s", "0")), ("migrated", ())):
            prompts = [f"Story {number}.{story}, {what}: once upon a time" for story in range(_NUM_STREAMS)]
            before, drain = _moves(two), _Drain(two, "b", *flags, "--wait")
            streams = _begin(two, _STORY_TOKENS, prompts)
            streams.wait_begun()
            drained_s = drain.run()
            num_moved = _moves(two) - before
            drained = streams.read()
            _drain(two, "b", "--undo")
            usual = _begin(two, _STORY_TOKENS, prompts).read()
            _tell_drain(f"{what}, {num_moved:.0f} streams moved in {drained_s:.1f} s", drained, usual)


class _Drain:
    """A command that has been loaded, and waits."""

    def __init__(self, two: TwoHosts, host: str, *flags: str) -> None:
        command = [sys.executable, "-c", _LOADED_COMMAND, "drain", "--host", host, *RUNTIME, *flags]
        self._process = two.a.popen(command, stderr=subprocess.DEVNULL, stdin=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"loaded\n"

    def run(self) -> float:
        """Returns how long it took."""
        began_s = time.monotonic()
        self._process.communicate(b"\n", timeout=TIMEOUT_S)
        assert self._process.returncode == 0
        return time.monotonic() - began_s


def _moves(two: TwoHosts) -> float:
    """Requests that went on elsewhere so far, by either way."""
    figures = two.figures(two.a)["gateway-0"]
    return figures["migrations_moved_total"] + figures["interruptions_total"]


def _tell_drain(what: str, drained: list[Read], usual: list[Read]) -> None:
    is_same = [one.answer for one in drained] == [one.answer for one in usual]
    steps, longest, undisturbed = (
        sorted(gap for one in usual for gap in one.gaps_s),
        sorted(max(one.gaps_s) for one in drained),
        sorted(max(one.gaps_s) for one in usual),
    )
    print(
        f"{what}: longest wait of each stream p50 {_ms(longest, 0.5)}, p99 {_ms(longest, 0.99)} ms "
        f"(undisturbed {_ms(undisturbed, 0.5)}, {_ms(undisturbed, 0.99)}); "
        f"between tokens p50 {_ms(steps, 0.5)}, p99 {_ms(steps, 0.99)} ms; same texts: {is_same}",
        flush=True,
    )


def _ms(ascending: Sequence[float], share: float) -> str:
    return f"{1000 * ascending[min(len(ascending) - 1, int(share * len(ascending)))]:.0f}"


def _long(number: int) -> str:
    return " ".join(f"Case {number}.{line}: whoever reads this line goes on to the next one." for line in range(46))


def _first_token_ms(two: TwoHosts, prompt: str) -> float:
    [answer] = _begin(two, 4, [prompt]).read()
    return 1000 * (answer.times_s[1] - answer.times_s[0])


def _begin(two: TwoHosts, max_tokens: int, prompts: Sequence[str]) -> Streams:
    """Of a client at host a."""
    options = {"temperature": 0.0, "max_tokens": max_tokens}
    return Streams(two.a, [Asked(prompt, options) for prompt in prompts])


def _drain(two: TwoHosts, host: str, *flags: str) -> float:
    return _Drain(two, host, *flags).run()


if __name__ == "__main__":
    main()
