"""Who sends what would be a line of its own in a log, were it written there as it comes.

Each attempt waits for a line that repeats what it has sent: where none does, nothing is shown.
"""

import asyncio
import json
from uuid import uuid4

import httpx
from tests.attacks.attempt import Attempt, Scene

from weir.testing.stack import wait_until

_LOW = "6 low"
_FORGED = "2026-01-01T00:00:00.000+00:00 ERROR forged"
_TIMEOUT_S = 60.0


async def _by_a_request(scene: Scene) -> str:
    """Of those that end well no log says a word, so its worker dies amid it."""
    mark = f"request-{uuid4().hex}"
    hostile = f"{mark}\n{_FORGED}"
    body = {
        "prompt": hostile,
        "user": hostile,
        "stop": [hostile],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"X-API-Key": scene.other_key, "X-Request-Id": hostile.replace("\n", "%0a").replace(" ", "%20")}
    [worker] = scene.stack.processes("decode")
    async with (
        httpx.AsyncClient(base_url=scene.stack.http_url, timeout=_TIMEOUT_S, headers=headers) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            return str(answer.status_code)
        parts = answer.aiter_bytes()  # kept: the answer is left with it
        await anext(parts)
        scene.stack.kill(worker)
        outcome = _found(scene, mark)
    wait_until(lambda: scene.stack.has_restarted(worker), timeout_s=_TIMEOUT_S, what=f"{worker.name} is there again")
    return outcome


async def _by_a_user_of_nats(scene: Scene) -> str:
    """Who is not let in; the server's log names him."""
    mark = f"user-{uuid4().hex}"
    shown = json.dumps({"user": f"{mark}\n{_FORGED}", "pass": "x", "verbose": True})
    host, _, port = scene.stack.processes("nats")[0].address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await reader.readline()  # what the server says of itself
            writer.write(f"CONNECT {shown}\r\n".encode())
            answer = await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()
    return _found(scene, mark) if b"Authorization Violation" in answer else answer.decode()


def _found(scene: Scene, mark: str) -> str:
    """Where the logs have what was sent with this mark."""
    try:
        wait_until(
            lambda: any(mark in line for line in _lines(scene)), timeout_s=_TIMEOUT_S, what=f"a line with {mark}"
        )
    except TimeoutError:
        return "in no log"
    return "a line of its own" if any(line.startswith(_FORGED) for line in _lines(scene)) else "within a line"


def _lines(scene: Scene) -> list[str]:
    """Of all logs, with whatever ends a line on some terminal."""
    return [line for path in scene.paths.logs.iterdir() for line in path.read_text(errors="replace").splitlines()]


ATTEMPTS = (
    Attempt(_LOW, "a line in the log: a request", "within a line", _by_a_request),
    Attempt(_LOW, "a line in the log: a user of NATS", "within a line", _by_a_user_of_nats),
)
