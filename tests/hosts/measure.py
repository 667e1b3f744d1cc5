"""What clients of a stack of two hosts see of its pages and its drains: `python -m tests.hosts.measure`, as root.

prefix  time to the first token of 900 tokens of prompt: all but the end cached at the other host, computed, cached
drain   of 16 streams the longest wait between two tokens, while one of the hosts is drained
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.hosts.two_hosts import RUNTIME, TIMEOUT_S, WEIR, TwoHosts, open_two_hosts

from weir.testing.stack import wait_until

_NUM_STREAMS, _NUM_ROUNDS, _STORY_TOKENS = 16, 4, 400
_CLIENT = """
import asyncio, json, sys, time
from weir.client import AsyncWeirClient, GenerateOptions

async def ask(client, prompt, max_tokens):
    times, texts = [time.monotonic()], []
    options = GenerateOptions(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    async for chunk in client.generate(prompt, options):
        times.append(time.monotonic())
        texts.append(chunk.text)
    return [times, "".join(texts)]

async def main(max_tokens, *prompts):
    async with AsyncWeirClient("a:50051") as client:
        print(json.dumps(await asyncio.gather(*(ask(client, prompt, int(max_tokens)) for prompt in prompts))))

asyncio.run(main(*sys.argv[1:]))
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
    """In turns: a drain that has its streams go on elsewhere at once, and one that lets them migrate."""
    prompts = [f"Story {number}: once upon a time" for number in range(_NUM_STREAMS)]
    for _ in range(_NUM_ROUNDS):
        usual = _answers(two, _STORY_TOKENS, prompts)
        for what, flags in (("interrupted", ("--grace-s", "0")), ("migrated", ())):
            asking = _begin(two, _STORY_TOKENS, prompts)
            wait_until(
                lambda: two.figures(two.b)["decode-0"]["num_running"] >= 6, timeout_s=TIMEOUT_S, what="b decodes"
            )
            time.sleep(1)
            before = _moves(two)
            drained_s = _drain(two, "b", *flags, "--wait")
            num_moved = _moves(two) - before
            drained = json.loads(asking.communicate(timeout=TIMEOUT_S)[0])
            _drain(two, "b", "--undo")
            _tell_drain(f"{what}, {num_moved:.0f} streams moved in {drained_s:.1f} s", drained, usual)
            time.sleep(1)


def _moves(two: TwoHosts) -> float:
    """Requests that went on elsewhere so far, by either way."""
    figures = two.figures(two.a)["gateway-0"]
    return figures["migrations_moved_total"] + figures["interruptions_total"]


def _tell_drain(what: str, drained: list[tuple[list[float], str]], usual: list[tuple[list[float], str]]) -> None:
    is_same = [text for _, text in drained] == [text for _, text in usual]
    steps = sorted(gap for times, _ in usual for gap in _gaps(times))
    longest = sorted(max(_gaps(times)) for times, _ in drained)
    undisturbed = sorted(max(_gaps(times)) for times, _ in usual)
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
    [(times, _)] = _answers(two, 4, [prompt])
    return 1000 * float(times[1] - times[0])


def _answers(two: TwoHosts, max_tokens: int, prompts: Sequence[str]) -> list[tuple[list[float], str]]:
    told: list[tuple[list[float], str]] = json.loads(_begin(two, max_tokens, prompts).communicate(timeout=TIMEOUT_S)[0])
    return told


def _begin(two: TwoHosts, max_tokens: int, prompts: Sequence[str]) -> "subprocess.Popen[bytes]":
    """A client at host a."""
    return two.a.popen([sys.executable, "-c", _CLIENT, str(max_tokens), *prompts])


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times[1:])]


def _drain(two: TwoHosts, host: str, *flags: str) -> float:
    """Returns how long it took, the command's own start included."""
    began_s = time.monotonic()
    two.a.run(*WEIR, "drain", "--host", host, *RUNTIME, *flags, timeout_s=TIMEOUT_S)
    return time.monotonic() - began_s


if __name__ == "__main__":
    main()
