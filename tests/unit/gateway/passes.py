"""How long the passes of a gateway's event loop are while one tenant attacks: nobody else is served in one.

    python -m tests.unit.gateway.passes half-sent      # 64 bodies of 3 MB of which the end never comes
    python -m tests.unit.gateway.passes turns          # conversations of 100,000 turns, eight at once, again and again
    python -m tests.unit.gateway.passes lists          # 4 MiB of empty lists
    python -m tests.unit.gateway.passes long-turns     # conversations of 1 MiB

The gateway has scripted workers and is idle but for the attack. Prints milliseconds of processor time of the longest
passes, which do not count what other processes had of the processors.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable

import uvloop
from tests.unit.gateway.test_access import CLOSED, KEY_A
from tests.unit.gateway.test_body_sizes import HOSTILE
from tests.unit.gateway.world import World, open_world
from tests.unit.rpc.test_body_budget import B

from weir.rpc.port_guard import PortLimits

_SECONDS = 5.0
_NUM_SHOWN = 8
_LONG_TURNS = [{"role": "user", "content": "ab " * 300}] * 1024


def _head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY_A}\r\nContent-Length: {length}\r\n\r\n".encode()


def _half_sent(port: int, all_there: threading.Barrier) -> None:
    connection = socket.create_connection(("127.0.0.1", port))
    all_there.wait()
    connection.sendall(_head("/v1/completions", 4_000_000) + b" " * 3_000_000)
    time.sleep(2 * _SECONDS)


def _posting(path: str, make_body: Callable[[], bytes]) -> Callable[[int, threading.Barrier], None]:
    """Again and again."""

    def post(port: int, all_there: threading.Barrier) -> None:
        all_there.wait()
        raw = make_body()
        while True:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(_head(path, len(raw)) + raw)
                connection.recv(1)

    return post


_ATTACKS: dict[str, tuple[int, Callable[[int, threading.Barrier], None]]] = {
    "half-sent": (64, _half_sent),
    "turns": (8, _posting(*HOSTILE["100,000 turns"])),
    "lists": (8, _posting(*HOSTILE["4 MiB of empty lists"])),
    "long-turns": (8, _posting("/v1/chat/completions", lambda: json.dumps({"messages": _LONG_TURNS}).encode())),
}


def _attack(name: str, port: int) -> None:
    def run() -> None:
        with contextlib.suppress(OSError):  # refused while it sends
            make(port, all_there)

    num, make = _ATTACKS[name]
    all_there = threading.Barrier(num)
    for _ in range(num):
        threading.Thread(target=run, daemon=True).start()
    time.sleep(_SECONDS)


async def _watch(passes_s: list[float]) -> None:
    before_s = time.thread_time()
    while True:
        await asyncio.sleep(0.001)
        now_s = time.thread_time()
        passes_s.append(now_s - before_s)
        before_s = now_s


async def _ask_often(world: World) -> None:
    """Another tenant, so that shares count."""
    while True:
        world.gateway.processor.threads.note(B)
        await asyncio.sleep(0.3)


async def _measure(name: str) -> None:
    limits = PortLimits(max_message_bytes=4 << 20, max_calls=2112)
    async with open_world(rules=CLOSED, port_limits=limits) as world:
        passes_s: list[float] = []
        beside = [asyncio.create_task(_watch(passes_s)), asyncio.create_task(_ask_often(world))]
        port = str(world.gateway.http_port)
        command = [sys.executable, "-m", "tests.unit.gateway.passes", name, "--port", port]
        attacker = await asyncio.create_subprocess_exec(*command)
        await attacker.wait()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    print(name, *[f"{1000 * one_s:.0f}" for one_s in sorted(passes_s, reverse=True)[:_NUM_SHOWN]])  # noqa: T201 - a program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=_ATTACKS)
    parser.add_argument("--port", type=int, help="make the attack on the gateway there")
    asked = parser.parse_args()
    if asked.port:
        _attack(asked.attack, asked.port)
    else:
        uvloop.run(_measure(asked.attack))


if __name__ == "__main__":
    main()
