"""What one tenant notices while another one holds all that it can get of a gateway, or sends it what takes long.

    weir up --limits limits.toml      # with keys of two tenants
    python -m benchmarks.overload.attack --http http://127.0.0.1:8000 --key KEY --other-key KEY

Prints a line for each attack, of all rounds: what became of it; of the other tenant meanwhile the time to the first
token of short requests at a steady rate (p99 also as a ratio to that without an attack, in the same rounds, and where
that lies in nine of ten draws of as many rounds), the longest wait between two responses of its streams (also of a new
stream for its first one), the longest of its small calls for tokens; all in milliseconds; and how many failed.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import numpy as np

from weir.bench.serving.figures import percentile
from weir.client import AsyncWeirClient, GenerateOptions
from weir.core.errors import WeirError

_MEBIBYTE = 1 << 20
_NUM_STALLED = 64
_AT_ONCE = 8
_LOWEST = 19
"""The priority of whom everybody else goes before (nice)."""
_SMALL = "word " * 600
_NUM_DRAWS = 1000
_DROPPED_ANSWER_S = 2.0
"""After which the control refuses what it has dropped, as the gateway does whom it refuses again and again."""

_Attack = Callable[[argparse.Namespace, Counter[str]], Awaitable[None]]


@dataclass(slots=True)
class Seen:
    """By the tenant that is to be served: until each first token of its short requests, between two responses of its
    streams, and for each small call."""

    ttfts_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)
    num_failed: int = 0


@dataclass(slots=True)
class Other:
    """The tenant that is to be served: streams without an end, short requests at a steady rate, and one small call
    after the other."""

    asked: argparse.Namespace
    seen: Seen = field(default_factory=Seen)

    async def ask_often(self) -> None:
        """However long each takes."""
        async with (
            AsyncWeirClient(self.asked.address, api_key=self.asked.other_key) as client,
            asyncio.TaskGroup() as all_,
        ):
            for number in itertools.count():
                all_.create_task(self._ask(client, number))
                await asyncio.sleep(1 / self.asked.rate)

    async def _ask(self, client: AsyncWeirClient, number: int) -> None:
        seen, began_s = self.seen, time.monotonic()
        try:
            async for _ in client.generate(f"Letter {number}: dear", GenerateOptions(max_tokens=2, seed=number)):
                seen.ttfts_s.append(time.monotonic() - began_s)
                break
        except WeirError:
            seen.num_failed += 1

    async def stream(self, number: int) -> None:
        async with AsyncWeirClient(self.asked.address, api_key=self.asked.other_key) as client:
            while True:
                since_s = time.monotonic()
                try:
                    options = GenerateOptions(temperature=1, seed=number, max_tokens=256, ignore_eos=True)
                    async for _ in client.generate(f"Story {number}: once", options):
                        now_s = time.monotonic()
                        self.seen.waits_s.append(now_s - since_s)
                        since_s = now_s
                except WeirError:
                    self.seen.num_failed += 1
                    await asyncio.sleep(0.1)

    async def call(self) -> None:
        async with (
            AsyncWeirClient(self.asked.address, api_key=self.asked.other_key) as client,
            httpx.AsyncClient(base_url=self.asked.http, timeout=60) as http,
        ):
            while True:
                began_s = time.monotonic()
                try:
                    await client.tokenize(_SMALL)
                    headers = {"X-API-Key": self.asked.other_key}
                    (await http.post("/tokenize", json={"prompt": _SMALL}, headers=headers)).raise_for_status()
                except (WeirError, httpx.HTTPError):
                    self.seen.num_failed += 1
                self.seen.calls_s.append(time.monotonic() - began_s)
                await asyncio.sleep(0.05)


async def _stalled(asked: argparse.Namespace, outcomes: Counter[str]) -> None:
    """Messages and bodies of which the end never comes."""

    async def message() -> AsyncIterator[bytes]:
        await asyncio.sleep(3600)
        yield b""

    async def call(channel: grpc.aio.Channel) -> None:
        stub: Any = channel.stream_stream("/weir.v1.Inference/Generate")
        try:
            async for _ in stub(message(), metadata=(("x-api-key", asked.key),)):
                pass
        except grpc.aio.AioRpcError as error:
            outcomes[error.code().name] += 1

    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(asked.address))
        await asyncio.gather(*[call(channel) for _ in range(_NUM_STALLED)], _stalled_bodies(asked, outcomes))


async def _stalled_bodies(asked: argparse.Namespace, outcomes: Counter[str]) -> None:
    async def body() -> None:
        host, _, port = asked.http.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-API-Key: {asked.key}\r\nContent-Length: 4000000\r\n\r\n"
        try:
            writer.write(head.encode() + b" " * 3_000_000)
            outcomes[(await reader.readline()).decode()[9:12]] += 1
        finally:
            writer.close()

    await asyncio.gather(*[body() for _ in range(_NUM_STALLED)])


def _posting(path: str, body: Mapping[str, Any] | bytes, *, key: str = "") -> _Attack:
    """The same body again and again, with as little work here as can be: an attacker has processors of his own."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def post(asked: argparse.Namespace, outcomes: Counter[str]) -> None:
        host, _, port = asked.http.removeprefix("http://").partition(":")
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {key or asked.key}\r\nConnection: close\r\n"
        sent = f"{head}Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw

        async def again() -> None:
            while True:
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(sent)
                    outcomes[(await reader.readline()).decode()[9:12]] += 1
                    await reader.read()
                except OSError as error:
                    outcomes[type(error).__name__] += 1
                finally:
                    writer.close()

        await asyncio.gather(*[again() for _ in range(_AT_ONCE)])

    return post


def _dropped(attack: _Attack) -> _Attack:
    """The same against a socket of the attacker's own, which reads, drops and refuses: what of an attack is the
    attacker's own work on these processors, and none of the gateway's."""

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            num_left = int(head.partition("Content-Length: ")[2].partition("\r\n")[0])
            while num_left > 0 and (piece := await reader.read(64 << 10)):
                num_left -= len(piece)
            if num_left <= 0:
                await asyncio.sleep(_DROPPED_ANSWER_S)
                writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        except asyncio.CancelledError:  # asyncio says in five lines that a connection's task was cancelled
            pass
        finally:
            writer.close()

    async def attack_it(asked: argparse.Namespace, outcomes: Counter[str]) -> None:
        async with await asyncio.start_server(drop, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            await attack(argparse.Namespace(**vars(asked) | {"http": f"http://{host}:{port}"}), outcomes)

    return attack_it


async def _nothing(asked: argparse.Namespace, outcomes: Counter[str]) -> None:
    await asyncio.sleep(3600)


_TOKEN_IDS = b'{"prompt":[' + b"1," * (2 * _MEBIBYTE) + b"1]}"
_TURN = {"role": "user", "content": "Hi"}
_MANY_TURNS = _posting("/v1/chat/completions", {"messages": [_TURN] * 100_000})
_ATTACKS: Mapping[str, _Attack] = {
    "nothing": _nothing,
    "requests of 64 tokens": _posting("/v1/completions", {"prompt": "Once", "max_tokens": 64, "ignore_eos": True}),
    "prompts of 1,000 tokens": _posting("/v1/completions", {"prompt": "word " * 1000, "max_tokens": 1}),
    "a grammar": _posting("/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "a+b"}}),
    f"{_NUM_STALLED} half-sent messages and as many bodies": _stalled,
    f"{_NUM_STALLED} half-sent bodies, dropped": _dropped(_stalled_bodies),
    "prompts of 1 MiB": _posting("/v1/completions", {"prompt": "word " * 200_000}),
    "conversations of 1 MiB": _posting(
        "/v1/chat/completions", {"messages": [{**_TURN, "content": "ab " * 300}] * 1024}
    ),
    "conversations of 100,000 turns": _MANY_TURNS,
    "conversations of 100,000 turns, dropped": _dropped(_MANY_TURNS),
    "4 MiB of empty lists": _posting(
        "/v1/completions", b'{"prompt":"x","y":[' + b"[]," * (4 * _MEBIBYTE // 3) + b"[]]}"
    ),
    "4 MiB of token ids": _posting("/v1/completions", _TOKEN_IDS),
    "4 MiB of token ids, with a key of nobody's": _posting("/v1/completions", _TOKEN_IDS, key="nobodys-key-0000000001"),
    "nothing, once more": _nothing,
}
"""Some say what is not the gateway's: what is dropped and a key of nobody's are the attacker's own work on these
processors, and the last says how much two rows of the same differ."""


def _get_what_others_leave() -> None:
    """Of processor time: an attacker has his own machine."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # where each session has an equal share, a process' priority counts within it
        Path("/proc/self/autogroup").write_text(str(_LOWEST))


async def _attack(asked: argparse.Namespace) -> None:
    """In a process of its own, so that nothing of it is in the way of what the other tenant measures; when it is told
    to, since its start takes a second of a core."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    outcomes: Counter[str] = Counter()
    attacking = asyncio.ensure_future(_ATTACKS[asked.attack](asked, outcomes))
    await asyncio.wait([attacking], timeout=asked.seconds)
    attacking.cancel()
    await asyncio.gather(attacking, return_exceptions=True)
    print(json.dumps(outcomes))


async def _measured(other: Other, attack: str) -> tuple[Seen, Counter[str]]:
    """What the other tenant notices of one attack, and for a while after it; and what became of the attack."""
    asked = other.asked
    address = ["--http", asked.http, "--address", asked.address, "--key", asked.key, "--other-key", asked.other_key]
    command = ["-m", "benchmarks.overload.attack", *address, "--seconds", str(asked.seconds), "--attack", attack]
    pipe = asyncio.subprocess.PIPE
    attacker = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=pipe, stdout=pipe, start_new_session=True
    )
    assert attacker.stdout is not None
    await attacker.stdout.readline()
    await asyncio.sleep(1)
    seen = other.seen = Seen()
    said, _ = await attacker.communicate(b"\n")
    return seen, Counter(json.loads(said))


async def _main(asked: argparse.Namespace) -> None:
    other = Other(asked)
    running = [asyncio.create_task(other.stream(number)) for number in range(asked.streams)]
    running += [asyncio.create_task(other.call()), asyncio.create_task(other.ask_often())]
    await asyncio.sleep(3)
    names = asked.only or list(_ATTACKS)
    rounds: dict[str, list[Seen]] = {name: [] for name in names}
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in names}
    for _ in range(asked.rounds):
        for name in names:
            seen, outcomes_now = await _measured(other, name)
            rounds[name].append(seen)
            outcomes[name].update(outcomes_now)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    if not all(any(seen.ttfts_s for seen in seen_of) for seen_of in rounds.values()):
        sys.exit("in all rounds of an attack no request of the other tenant was answered: give --seconds more")
    print("| attack | what became of it | first token p50 | p99 | of nothing's | longest wait | call | failed |")
    print("|---|---|---|---|---|---|---|---|")
    for name, seen_of in rounds.items():
        ends = ", ".join(f"{num} of {end}" for end, num in sorted(outcomes[name].items()))
        print(f"| {name} | {ends} | {_figures(seen_of, rounds['nothing'])} |")


def _figures(rounds: Sequence[Seen], usual: Sequence[Seen]) -> str:
    """As cells of a row."""
    ttfts_s = [seen.ttfts_s for seen in rounds]
    usual_s = [seen.ttfts_s for seen in usual]
    p50_s, p99_s = percentile(list(itertools.chain(*ttfts_s)), 50), _p99(ttfts_s)
    least, most = ratio_interval(ttfts_s, usual_s)
    wait_s = max(itertools.chain(*(seen.waits_s for seen in rounds)), default=0.0)
    call_s = max(itertools.chain(*(seen.calls_s for seen in rounds)), default=0.0)
    ratio = f"{p99_s / _p99(usual_s):.2f} ({least:.2f} to {most:.2f})"
    times = [f"{1000 * p50_s:.0f}", f"{1000 * p99_s:.0f}", ratio, f"{1000 * wait_s:.0f}", f"{1000 * call_s:.0f}"]
    return " | ".join((*times, str(sum(seen.num_failed for seen in rounds))))


def _p99(rounds: Sequence[Sequence[float]]) -> float:
    return percentile(list(itertools.chain(*rounds)), 99)


def ratio_interval(rounds: Sequence[Sequence[float]], usual: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Of the 99th percentiles of both, in nine of ten draws of as many rounds with repetition (Efron's bootstrap of
    1979). Rounds of the same number followed each other, so they are drawn together."""
    draw, numbers, ratios = random.Random(0), range(len(rounds)), list[float]()
    both = [[np.array(ttfts_s) for ttfts_s in one] for one in (rounds, usual)]
    for _ in range(_NUM_DRAWS):
        drawn = draw.choices(numbers, k=len(rounds))
        ours, theirs = (np.percentile(np.concatenate([one[number] for number in drawn]), 99) for one in both)
        ratios.append(float(ours / theirs))
    return percentile(ratios, 5), percentile(ratios, 95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", default="http://127.0.0.1:8000", help="the HTTP port")
    parser.add_argument("--address", default="127.0.0.1:50051", help="the gRPC port")
    parser.add_argument("--key", required=True, help="of the tenant that attacks")
    parser.add_argument("--other-key", required=True, help="of the one that is to be served")
    parser.add_argument("--streams", type=int, default=4, help="of the other")
    parser.add_argument("--rate", type=float, default=10.0, help="short requests of the other a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each attack in each round")
    parser.add_argument("--rounds", type=int, default=3, help="in which each attack has its turn")
    parser.add_argument("--only", choices=_ATTACKS, action="append", help="these alone, `nothing` among them")
    parser.add_argument("--attack", choices=_ATTACKS, help="make this one, and measure nothing")
    asked = parser.parse_args()
    if asked.only and "nothing" not in asked.only:
        parser.error("--only: `nothing` must be among them, to which the others are compared")
    if asked.attack:
        _get_what_others_leave()
        asyncio.run(_attack(asked))
    else:
        asyncio.run(_main(asked))


if __name__ == "__main__":
    main()
