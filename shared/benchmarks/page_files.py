"""Time to the first token of a chat's second turn, after a restart of the whole stack, with and without pages in files:

    python -m benchmarks.page_files [--chats 4] [--tokens 4000] [--model smollm2-135m]
    python -m benchmarks.page_files --store     what a page costs by itself, in files that the system has in memory

arena       the stack that answered the first turn answers the second: the limit
files       another stack, over the folder of files; read from the disk
files again the same, while the system has the files in memory
computed    another stack without files

In each the prompts are as long, and of one text but for their last part. Tokens with files and computed are compared.
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
from weir.kv.tiers.page_header import PageLayout
from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

_ANSWER_TOKENS, _NEW_TOKENS = 64, 300
_TIMEOUT_S = 600.0
_GIB = 1 << 30
_PAGE_BYTES, _NUM_PAGES = 368_640, 1000
"""Of the built-in model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chats", type=int, default=4, help="one after the other")
    parser.add_argument("--tokens", type=int, default=4000, help="of a second turn's prompt")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--store", action="store_true", help="write and read pages, without a stack")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # not in memory, as /tmp may be
        if asked.store:
            _measure_store(Path(folder))
        else:
            asyncio.run(_measure(asked, Path(folder)))


async def _measure(asked: argparse.Namespace, folder: Path) -> None:
    files = folder / "files"
    plain = ("--model", asked.model, "--arena-bytes", str(2 * _GIB))
    with_files = (*plain, "--page-files-dir", str(files))
    num_first = asked.tokens - _ANSWER_TOKENS - _NEW_TOKENS
    firsts = [_text(chat, num_first) for chat in range(asked.chats)]

    with Stack(folder / "run", flags=with_files) as stack:
        answers, first_ms = await _ask(stack, firsts)
        chats = [first + answer for first, answer in zip(firsts, answers, strict=True)]
        _, arena_ms = await _ask(stack, _turns(chats, 0))
        wait_until(lambda: not _told(stack, "unwritten_pages"), timeout_s=_TIMEOUT_S, what="all pages are in files")
        print(
            f"first turns of {num_first} tokens: {_shown(first_ms)}; {_told(stack, 'written_pages_total'):.0f} pages "
            f"written in {_told(stack, 'write_seconds_total'):.2f} s of the writer",
            flush=True,
        )
    _forget(files)
    with Stack(folder / "run", flags=with_files) as stack:
        loaded, files_ms = await _ask(stack, _turns(chats, 1))
        print(
            f"read: {_told(stack, 'loaded_bytes_total') / _told(stack, 'load_seconds_total') / 1e9:.2f} GB/s",
            flush=True,
        )
    with Stack(folder / "run", flags=with_files) as stack:
        _, again_ms = await _ask(stack, _turns(chats, 2))
    with Stack(folder / "run", flags=plain) as stack:
        computed, computed_ms = await _ask(stack, _turns(chats, 1))
    for what, times in (
        ("arena", arena_ms),
        ("files", files_ms),
        ("files again", again_ms),
        ("computed", computed_ms),
    ):
        print(f"second turn of {asked.tokens} tokens, {what}: {_shown(times)}")
    print(f"computed / files {median(computed_ms) / median(files_ms):.1f}, same tokens: {loaded == computed}")
    sys.exit(loaded != computed)


def _measure_store(folder: Path) -> None:
    store = PageFileStore(folder / "files", PageLayout("measured", _PAGE_BYTES), 2 * _GIB)
    page, hashes = os.urandom(_PAGE_BYTES), [os.urandom(HASH_BYTES) for _ in range(_NUM_PAGES)]
    place = InPlace(memoryview(bytearray(_PAGE_BYTES)))
    for what, step in (
        ("written", lambda page_hash: store.try_put(page_hash, page)),
        ("read", lambda page_hash: store.try_get(page_hash, place)),
    ):
        began_s, cpu_s = time.monotonic(), time.process_time()
        if not all(map(step, hashes)):
            sys.exit(f"not all were {what}")
        rate = _NUM_PAGES / (time.monotonic() - began_s)
        cpu_ms = 1000 * (time.process_time() - cpu_s) / _NUM_PAGES
        print(f"{what}: {rate:.0f} pages/s, {rate * _PAGE_BYTES / 1e9:.2f} GB/s, {cpu_ms:.2f} ms of a processor each")


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


def _told(stack: Stack, name: str) -> float:
    return stack.metric("transfer", f"page_files_{name}")


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
