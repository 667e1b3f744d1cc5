"""Answers read by one client at a host, token by token, as they came and when."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.hosts.lab import Host
from tests.hosts.two_hosts import ADDRESS, TIMEOUT_S

_CLIENT = f"""
import asyncio, json, os, sys, time
from weir.client import AsyncWeirClient, GenerateOptions

def read_told(loop, is_over):
    if os.read(0, 1):
        is_over.set()
    loop.remove_reader(0)

async def ask(client, is_over, prompt, options, most):
    times, ids, texts, logprobs = [time.monotonic()], [], [], []
    async for chunk in client.generate(prompt, GenerateOptions(ignore_eos=True, **options)):
        assert chunk.first_index == len(ids), "a token is missing, or came twice"
        times.append(time.monotonic())
        if chunk.token_ids and not ids:
            print("begun", file=sys.stderr, flush=True)
        ids += chunk.token_ids
        texts.append(chunk.text)
        logprobs += [[one.token_id, round(one.logprob, 4)] for one in chunk.logprobs]
        if len(ids) >= most or is_over.is_set():
            break
    return [times, ids, "".join(texts), logprobs]

async def main(asked):
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(0, read_told, loop, is_over)
    async with AsyncWeirClient("{ADDRESS}") as client, asyncio.timeout({TIMEOUT_S}):
        print(json.dumps(await asyncio.gather(*(ask(client, is_over, *one) for one in asked))))

asyncio.run(main(json.loads(sys.argv[1])))
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """`options`: of GenerateOptions. The client goes away after `most` tokens."""

    prompt: str
    options: dict[str, Any]
    most: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Read:
    """What came: `times_s` from the request on, then of each chunk."""

    times_s: list[float]
    token_ids: list[int]
    text: str
    logprobs: list[tuple[int, float]]

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens."""
        return [later - earlier for earlier, later in zip(self.times_s[1:], self.times_s[2:], strict=False)]

    @property
    def answer(self) -> tuple[list[int], str, list[tuple[int, float]]]:
        """What does not depend on time."""
        return self.token_ids, self.text, self.logprobs


class Streams:
    """Several at once, of one client process at `host`."""

    def __init__(self, host: Host, asked: Sequence[Asked]) -> None:
        told = json.dumps([[one.prompt, one.options, one.most] for one in asked])
        self._num = len(asked)
        command, pipe = [sys.executable, "-c", _CLIENT, told], subprocess.PIPE
        self._process = host.popen(command, stderr=pipe, stdin=pipe)

    def wait_begun(self) -> None:
        """Until each has a token."""
        assert self._process.stderr is not None
        for _ in range(self._num):
            line = self._process.stderr.readline()
            assert line == b"begun\n", line + self._process.stderr.read()

    def leave(self) -> None:
        """The client goes away from each with its next tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(b".")
        self._process.stdin.flush()

    def read(self) -> list[Read]:
        """All of them, once all have ended."""
        output, errors = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0, errors.decode()
        return [
            Read(times, ids, text, [tuple(one) for one in logprobs])
            for times, ids, text, logprobs in json.loads(output)
        ]
