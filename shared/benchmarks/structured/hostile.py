"""Schemas, expressions, grammars, tools and bodies that explode or never end, sent to a stack that serves others.

    weir up --chat-template hermes
    python -m benchmarks.structured.hostile --http http://127.0.0.1:8000 --address 127.0.0.1:50051

Prints a line for each: its status, how long its answer took, and the longest wait between two responses of any of the
other streams meanwhile (also of a new stream for its first one).
"""

import argparse
import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weir.client import AsyncWeirClient, GenerateOptions
from weir.core.errors import WeirError

_REST_S = 0.3
"""After an answer, in which a stall of others would show still."""
_TIMEOUT_S = 60.0
_MEBIBYTE = 1 << 20
_USER = [{"role": "user", "content": "Hi"}]
_BOTH = {"allOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/c"}]}


def _function(name: str, schema: object, *, is_strict: bool = True) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": is_strict}}


def _tree(depth: int) -> dict[str, Any]:
    """Each definition refers to the next one ten times."""
    names = [f"k{number}" for number in range(10)]
    defs: dict[str, Any] = {
        f"d{level}": {
            "type": "object",
            "required": names,
            "properties": {n: {"$ref": f"#/$defs/d{level + 1}"} for n in names},
        }
        for level in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": {"type": "integer"}}}


def _constraints() -> Mapping[str, Mapping[str, Any]]:
    """`structured_outputs` of a completion."""
    return {
        "a small schema, the first one": {"json": {"type": "boolean"}},
        "schema: refers to itself": {"json": {"$ref": "#"}},
        "schema: two that refer to one another": {
            "json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": _BOTH, "c": {"$ref": "#/$defs/a"}}}
        },
        "schema: ten references in each of nine definitions": {"json": _tree(9)},
        "schema: 60 times either of two": {
            "json": {"allOf": [{"anyOf": [{"maxLength": n}, {"minimum": n}]} for n in range(60)]}
        },
        "schema: 10,000 deep": {"json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
        "schema: an enum of 6,000 texts": {"json": {"enum": [f"{number:06}" for number in range(6000)]}},
        "schema: an enum of 400,000 texts": {"json": {"enum": [f"{number:06}" for number in range(400_000)]}},
        "schema: a million items": {"json": {"type": "array", "minItems": 10**6}},
        "schema: a pattern that explodes": {"json": {"type": "string", "pattern": "^((a{0,99}b){0,99}c){0,99}$"}},
        "regex: a million states": {"regex": "(a{1,1000}){1,1000}"},
        "regex: alternatives that share all": {"regex": "(" + "|".join("a" * n + "b" for n in range(300)) + ")*c"},
        "regex: a, and 5,000 places later b": {"regex": "(.|\n)*a(.|\n){5000}b"},
        "grammar: refers to itself": {"grammar": "start: start"},
        "grammar: ambiguous": {"grammar": 'start: e\ne: e e e e e e | "a" | ""'},
        "grammar: 2,000 rules": {
            "grammar": "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1} | "b"' for n in range(2000)) + '\nr2000: "c"'
        },
    }


def _chats() -> Mapping[str, Mapping[str, Any]]:
    """What a chat has beside its messages."""
    keys = {f"key{number}": {"type": "string", "pattern": "[a-z]{1,200}"} for number in range(8)}
    large = {"type": "object", "properties": keys, "required": sorted(keys)}
    return {
        "tools: 128 of one name": {"tools": [_function("same", {"type": "object"})] * 128},
        "tools: 10,000": {"tools": [_function(f"t{number}", {"type": "object"}) for number in range(10_000)]},
        "tools: 128 strict ones with eight patterns": {
            "tools": [_function(f"t{number}", large) for number in range(128)]
        },
        "tools: one whose schema explodes": {
            "tools": [_function("x", {**_tree(9), "type": "object"})],
            "tool_choice": "required",
        },
        "tools: 4 MB of description": {
            "tools": [_function("x", {"type": "object", "description": "x" * 4 * _MEBIBYTE})]
        },
        "template: loops for ever": {
            "chat_template": "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
        },
        "template: variables 100 deep": {"chat_template_kwargs": json.loads('{"a":' * 100 + "1" + "}" * 100)},
        "chat: 100,000 turns": {"messages": _USER * 100_000},
    }


def _bodies() -> Mapping[str, tuple[str, bytes]]:
    """Path and body."""
    found = {
        name: ("/v1/completions", json.dumps({"prompt": "x", "max_tokens": 8, "structured_outputs": one}).encode())
        for name, one in _constraints().items()
    }
    found |= {
        name: ("/v1/chat/completions", json.dumps({"messages": _USER, "max_tokens": 8, **one}).encode())
        for name, one in _chats().items()
    }
    found["body: 4 MB of ["] = ("/v1/completions", b"[" * 4 * _MEBIBYTE)
    found["body: 4 MB of prompt"] = ("/v1/completions", json.dumps({"prompt": "word " * 800_000}).encode())
    found["body: 4 MB of a list of prompts"] = ("/v1/completions", json.dumps({"prompt": ["x"] * 800_000}).encode())
    return found


@dataclass(slots=True)
class OtherStreams:
    """What goes on meanwhile, without an end."""

    address: str
    waits: list[tuple[float, float]] = field(default_factory=list)
    """(when it began, how long it took)."""
    num_failed: int = 0

    async def run(self, number: int) -> None:
        async with AsyncWeirClient(self.address) as client:
            while True:
                since_s = time.monotonic()
                try:
                    options = GenerateOptions(temperature=1, seed=number, max_tokens=256, ignore_eos=True)
                    async for _ in client.generate(f"Story {number}: once", options):
                        now_s = time.monotonic()
                        self.waits.append((since_s, now_s - since_s))
                        since_s = now_s
                except WeirError:
                    self.num_failed += 1
                    await asyncio.sleep(0.1)

    def longest_ms(self, began_s: float, ended_s: float) -> float:
        """Of what overlaps that time."""
        during = [took for since, took in self.waits if since < ended_s and since + took > began_s]
        return 1000 * max(during, default=0.0)


def _send(url: str, body: bytes) -> tuple[int, str]:
    """Status, and the error's message."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            answer.read()
            return answer.status, ""
    except urllib.error.HTTPError as error:
        try:
            return error.code, str(json.loads(error.read())["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return error.code, ""


async def _main(asked: argparse.Namespace) -> None:
    others = OtherStreams(asked.address)
    running = [asyncio.create_task(others.run(number)) for number in range(asked.streams)]
    await asyncio.sleep(asked.quiet_s)
    now_s = time.monotonic()
    quiet_ms = others.longest_ms(now_s - asked.quiet_s + 1, now_s)
    print(f"| sent | status | ms | longest wait of {asked.streams} others, ms | says |\n|---|---|---|---|---|")
    print(f"| nothing, {asked.quiet_s - 1:g} s | | | {quiet_ms:.0f} | |", flush=True)
    for name, (path, body) in _bodies().items():
        began_s = time.monotonic()
        status, message = await asyncio.to_thread(_send, asked.http + path, body)
        took_ms = 1000 * (time.monotonic() - began_s)
        await asyncio.sleep(_REST_S)
        longest_ms = others.longest_ms(began_s, time.monotonic())
        shown = message[:100].replace("|", "\\|").replace("\n", " ")
        print(f"| {name} | {status} | {took_ms:.0f} | {longest_ms:.0f} | {shown} |", flush=True)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    print(f"\nOf the others {others.num_failed} failed; {len(others.waits)} responses.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", default="http://127.0.0.1:8000", help="the HTTP port")
    parser.add_argument("--address", default="127.0.0.1:50051", help="the gRPC port, for the other streams")
    parser.add_argument("--streams", type=int, default=4, help="others")
    parser.add_argument("--quiet-s", type=float, default=6.0, help="before the first is sent")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
