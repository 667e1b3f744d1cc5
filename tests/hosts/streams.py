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
import asyncio, json, sys, time
from weir.client import AsyncWeirClient, GenerateOptions

async def ask(client, prompt, options, most):
    times, ids, texts, logprobs = [time.monotonic()], [], [], []
    async for chunk in client.generate(prompt, GenerateOptions(ignore_eos=True, **options)):
        assert chunk.first_index == len(ids), "a token is missing, or came twice"
        times.append(time.monotonic())
        ids += chunk.token_ids
        texts.append(chunk.text)
        logprobs += [[one.token_id, round(one.logprob, 4)] for one in chunk.logprobs]
        if len(ids) == 1:
            print("begun", file=sys.stderr, flush=True)
        if len(ids) >= most:
            break
    return [times, ids, "".join(texts), logprobs]

async def main(asked):
    async with AsyncWeirClient("{ADDRESS}") as client:
        print(json.dumps(await asyncio.gather(*(ask(client, *one) for one in asked))))

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
        self._process = host.popen([sys.executable, "-c", _CLIENT, told], stderr=subprocess.PIPE)

    def wait_begun(self) -> None:
        """Until each has a token."""
        assert self._process.stderr is not None
        for _ in range(self._num):
            line = self._process.stderr.readline()
            assert line == b"begun\n", line + self._process.stderr.read()

    def read(self) -> list[Read]:
        """All of them, once all have ended."""
        output, errors = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0, errors.decode()
        return [
            Read(times, ids, text, [tuple(one) for one in logprobs])
            for times, ids, text, logprobs in json.loads(output)
        ]
