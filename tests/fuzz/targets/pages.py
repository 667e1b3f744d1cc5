"""Page streams: whatever the other end sends, the source sends nothing that was not offered to who asks, and a pull has
its pages as they were offered or fails. Files of pages: whatever is in one, it is read as it was written, or not."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz.choices import Choices, edited
from tests.fuzz.target import Check, Target, simple
from weir.core.life import Attempt
from weir.kv.memory.page_access import InPlace
from weir.kv.movers.frames import FrameHeader, FrameKind, pack_header
from weir.kv.movers.pipes import Buffer, PipeEnded
from weir.kv.movers.pull import PullFailed, WantedPage
from weir.kv.movers.source import PageSource, checksum_of
from weir.kv.movers.stream_pull import PagePull, PullHello, PullLimits
from weir.kv.tiers.page_file import read_page, write_page
from weir.kv.tiers.page_header import DamagedPage, PageLayout

_PAGES = tuple(bytes([number]) * 96 for number in range(6))
_HELLO = PullHello(b"t" * 16, Attempt(2, 0), b"k" * 16)
_NUM_OFFERED = 4


class _BytesPipe:
    """What comes is given; then it has ended."""

    def __init__(self, coming: bytes) -> None:
        self._coming = memoryview(coming)
        self.sent = bytearray()

    def send(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self.sent += buffer

    def receive(self, *buffers: memoryview) -> None:
        for buffer in buffers:
            if len(self._coming) < len(buffer):
                raise PipeEnded("all has come")
            buffer[:] = self._coming[: len(buffer)]
            self._coming = self._coming[len(buffer) :]

    def end(self) -> None: ...

    def close(self) -> None: ...


def check_source(data: bytes) -> None:
    choices = Choices(data)
    source = PageSource(lambda page_id: memoryview(_PAGES[page_id]), lambda page_id: page_id)
    source.offer(_HELLO.transfer_id, _HELLO.attempt, _HELLO.ticket)
    source.append(_HELLO.transfer_id, range(_NUM_OFFERED))
    asked = [choices.below(_NUM_OFFERED + 1) for _ in range(choices.below(6))]
    coming = _HELLO.frame() + (_HELLO.ask(asked) if asked else b"")
    is_edited = choices.byte() % 4 > 0
    pipe = _BytesPipe(edited(choices, coming) if is_edited else coming)
    source.serve(pipe)
    assert all(page not in pipe.sent for page in _PAGES[_NUM_OFFERED:])
    if not is_edited and asked and max(asked) < _NUM_OFFERED:
        assert all(_PAGES[number] in pipe.sent for number in asked)


def check_pull(data: bytes) -> None:
    choices = Choices(data)
    numbers = [choices.below(_NUM_OFFERED) for _ in range(1 + choices.below(4))]
    memory = [bytearray(len(_PAGES[number])) for number in numbers]
    coming = b"".join(_page_frame(choices, number) for number in numbers)
    coming = edited(choices, coming) if choices.byte() % 2 else coming
    limits = PullLimits(num_streams=1, max_breaks=0, rest_s=0.01)
    pull = PagePull(_HELLO, len(_PAGES[0]), lambda _: _BytesPipe(coming), limits, time.monotonic() + 5)
    pull.want(
        [
            WantedPage(number, number, checksum_of(_PAGES[number]), InPlace(memoryview(page)))
            for number, page in zip(numbers, memory, strict=True)
        ]
    )
    pull.finish()
    assert [bytes(page) for page in memory] == [_PAGES[number] for number in numbers]


def _page_frame(choices: Choices, number: int) -> bytes:
    kind = FrameKind.GONE if choices.byte() == 1 else FrameKind.PAGE
    page = _PAGES[number if choices.byte() != 1 else 5]
    body = page if kind is FrameKind.PAGE else b""
    header = FrameHeader(kind, _HELLO.transfer_id, _HELLO.attempt, number, number, len(body), checksum_of(page))
    return pack_header(header) + body


@contextmanager
def _files() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path, layout, page_hash = Path(folder, "page"), PageLayout("digest", 96), bytes(range(16))
        write_page(path, layout, page_hash, _PAGES[1])
        valid = path.read_bytes()

        def check(data: bytes) -> None:
            choices = Choices(data)
            path.write_bytes(edited(choices, valid) if choices.byte() % 8 else data)
            memory = bytearray(96)
            read_page(path, layout, page_hash, memoryview(memory))
            assert memory == _PAGES[1]

        yield check


TARGETS = (
    Target("page_files", _files, (DamagedPage,), ci_examples=200),
    Target("page_sources", simple(check_source), (), ci_examples=300),
    Target("page_pulls", simple(check_pull), (PullFailed,), ci_examples=200),
)
