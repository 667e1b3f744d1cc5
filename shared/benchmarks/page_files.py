"""Time to the first token of a chat's second turn, after a restart of the whole stack, with pages in a tier or without:

    python -m benchmarks.page_files [--chats 4] [--tokens 4000] [--model smollm2-135m] [--valkey redis://HOST:PORT]
    python -m benchmarks.page_files --store [--valkey URL]     what a page costs by itself, in each tier there is

arena       the stack that answered the first turn answers the second: the limit
tier        another stack, over the folder of files, which is read from the disk, or over the Valkey
tier again  the same, while the system has the files in memory
computed    another stack without the tier

In each the prompts are as long, and of one text but for their last part. Tokens of tier and computed are compared. The
Valkey is one that runs already, with a maxmemory, and keeps what this puts there. With --store files are those that the
system has in memory, and memory of the host is ordinary: a copy more, since no device takes a page from it here.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from weir.kv.memory.page_access import InPlace
from weir.kv.prefixes import HASH_BYTES
from weir.kv.tiers.file_store import PageFileStore
from weir.kv.tiers.memory_store import PageMemoryStore
from weir.kv.tiers.page_header import PageLayout
from weir.kv.tiers.page_store import PageStore
from weir.kv.tiers.valkey_address import parse_valkey_url
from weir.kv.tiers.valkey_client import ValkeySettings
from weir.kv.tiers.valkey_store import ValkeyPageStore
from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

_ANSWER_TOKENS, _NEW_TOKENS = 64, 300
_TIMEOUT_S = 600.0
_GIB = 1 << 30
_PAGE_BYTES, _NUM_PAGES, _ROUNDS = 368_640, 500, 3
"""Of the built-in model; pages of a round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chats", type=int, default=4, help="one after the other")
    parser.add_argument("--tokens", type=int, default=4000, help="of a second turn's prompt")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--store", action="store_true", help="write and read pages, without a stack")
    parser.add_argument("--valkey", default="", help="its URL; without one pages are in files")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # not in memory, as /tmp may be
        if asked.store:
            _measure_stores(Path(folder), asked.valkey)
        else:
            asyncio.run(_measure(asked, Path(folder)))


async def _measure(asked: argparse.Namespace, folder: Path) -> None:
    files = folder / "files"
    plain = ("--model", asked.model, "--arena-bytes", str(2 * _GIB))
    tier = "valkey" if asked.valkey else "files"
    where = ("--page-valkey-url", asked.valkey) if asked.valkey else ("--page-files-dir", str(files))
    with_tier = (*plain, *where)
    num_first = asked.tokens - _ANSWER_TOKENS - _NEW_TOKENS
    firsts = [_text(chat, num_first) for chat in range(asked.chats)]

    with Stack(folder / "run", flags=with_tier) as stack:
        answers, first_ms = await _ask(stack, firsts)
        chats = [first + answer for first, answer in zip(firsts, answers, strict=True)]
        _, arena_ms = await _ask(stack, _turns(chats, 0))
        wait_until(lambda: not _told(stack, tier, "unwritten_pages"), timeout_s=_TIMEOUT_S, what="all are written")
        num_written, writing_s = (_told(stack, tier, f"{name}_total") for name in ("written_pages", "write_seconds"))
        print(
            f"first turns of {num_first} tokens: {_shown(first_ms)}; {num_written:.0f} pages written in "
            f"{writing_s:.2f} s of the writer",
            flush=True,
        )
    _forget(files)
    with Stack(folder / "run", flags=with_tier) as stack:
        loaded, tier_ms = await _ask(stack, _turns(chats, 1))
        num_bytes, loading_s = (_told(stack, tier, f"{name}_total") for name in ("loaded_bytes", "load_seconds"))
        print(f"read: {num_bytes / loading_s / 1e9:.2f} GB/s", flush=True)
    with Stack(folder / "run", flags=with_tier) as stack:
        _, again_ms = await _ask(stack, _turns(chats, 2))
    with Stack(folder / "run", flags=plain) as stack:
        computed, computed_ms = await _ask(stack, _turns(chats, 1))
    for what, times in (
        ("arena", arena_ms),
        (tier, tier_ms),
        (f"{tier} again", again_ms),
        ("computed", computed_ms),
    ):
        print(f"second turn of {asked.tokens} tokens, {what}: {_shown(times)}")
    print(f"computed / {tier} {median(computed_ms) / median(tier_ms):.1f}, same tokens: {loaded == computed}")
    sys.exit(loaded != computed)


def _host_memory(num_pages: int) -> memoryview:
    return memoryview(bytearray(num_pages * _PAGE_BYTES))


def _measure_stores(folder: Path, valkey: str) -> None:
    layout = PageLayout(f"measured {os.urandom(8).hex()}", _PAGE_BYTES)  # of an earlier run nothing is there
    stores: dict[str, PageStore] = {
        "memory": PageMemoryStore(_PAGE_BYTES, 2 * _GIB, _host_memory),
        "files": PageFileStore(folder / "files", layout, 2 * _GIB),
    }
    if valkey:
        stores["valkey"] = ValkeyPageStore(ValkeySettings(parse_valkey_url(valkey)), layout)
    pages = [os.urandom(HASH_BYTES) for _ in range(_ROUNDS * _NUM_PAGES)]
    for number in range(_ROUNDS):
        for name, store in stores.items():
            _measure_store(name, store, pages[number * _NUM_PAGES : (number + 1) * _NUM_PAGES])
    for store in stores.values():
        store.close()


def _measure_store(name: str, store: PageStore, hashes: Sequence[bytes]) -> None:
    page, place = os.urandom(_PAGE_BYTES), InPlace(memoryview(bytearray(_PAGE_BYTES)))
    for what, step in (
        ("written", lambda page_hash: store.try_put(page_hash, page)),
        ("read", lambda page_hash: store.try_get(page_hash, place)),
    ):
        began_s, cpu_s = time.monotonic(), time.process_time()
        if not all(map(step, hashes)):
            sys.exit(f"not all were {what}")
        rate = len(hashes) / (time.monotonic() - began_s)
        cpu_ms = 1000 * (time.process_time() - cpu_s) / len(hashes)
        figures = f"{rate:.0f} pages/s, {rate * _PAGE_BYTES / 1e9:.2f} GB/s, {cpu_ms:.2f} ms of a processor each"
        print(f"{name}, {what}: {figures}", flush=True)


def _turns(chats: Sequence[list[int]], number: int) -> list[list[int]]:
    """Each chat with a further turn, another one for each `number`."""
    return [chat + _text(100 + 10 * number + index, _NEW_TOKENS) for index, chat in enumerate(chats)]


def _text(seed: int, num_tokens: int) -> list[int]:
    """Token ids that no other seed begins with."""
    return [1000 + (seed * 7919 + index * 31) % 40_000 for index in range(num_tokens)]


async def _ask(stack: Stack, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[float]]:
    """Answers and milliseconds to the first token, one after the other, behind one that nobody counts."""
    tokens, times_ms = [], []
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        await stream(stub, greedy_request("Hello", max_tokens=8, ignore_eos=True), timeout_s=_TIMEOUT_S)
        for prompt in prompts:
            answer: list[int] = []
            began_s, first_s = time.monotonic(), 0.0
            request = greedy_request(prompt, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
            async for response in stub.Generate(request, timeout=_TIMEOUT_S):
                first_s = first_s or time.monotonic() - began_s
                answer += response.token_ids
            tokens.append(answer)
            times_ms.append(1000 * first_s)
    return tokens, times_ms


def _told(stack: Stack, tier: str, name: str) -> float:
    return stack.metric("transfer", f"page_{tier}_{name}")


def _forget(folder: Path) -> None:
    """Has the system write the files to the disk and keep nothing of them in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _shown(times_ms: Sequence[float]) -> str:
    return f"{median(times_ms):.0f} ms ({min(times_ms):.0f} to {max(times_ms):.0f})"


if __name__ == "__main__":
    main()
