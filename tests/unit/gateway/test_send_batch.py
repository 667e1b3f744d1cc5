"""What connections write in one pass of the loop is sent at its end, in order, and nothing of it is lost."""

import asyncio
from typing import Any

from weir_gateway.frontends.send_batch import BatchedTransport, SendBatch


class RecordingTransport(asyncio.Transport):
    """Keeps what it is given, in a list that it may share with others."""

    def __init__(self, name: str, sent: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self._name = name
        self._sent = sent
        self.is_closed = False

    def write(self, data: Any) -> None:
        self._sent.append((self._name, bytes(data)))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def get_write_buffer_size(self) -> int:
        return 100


class BrokenTransport(RecordingTransport):
    """Takes nothing."""

    def write(self, data: Any) -> None:
        raise RuntimeError("the handle is closed")


def make_pair() -> tuple[BatchedTransport, BatchedTransport, list[tuple[str, bytes]]]:
    sent: list[tuple[str, bytes]] = []
    batch = SendBatch()
    first, second = (BatchedTransport(RecordingTransport(name, sent), batch) for name in "ab")
    return first, second, sent


async def test_writes_of_one_pass_go_out_once_a_connection_after_all_that_was_ready_has_run() -> None:
    first, second, sent = make_pair()
    first.write(b"1")
    asyncio.get_running_loop().call_soon(second.write, b"2")
    first.write(b"3")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(sent) == [("a", b"13"), ("b", b"2")]
    first.write(b"4")
    await asyncio.sleep(0)
    assert sent[2:] == [("a", b"4")]


async def test_a_connection_that_cannot_be_written_to_is_dropped_and_the_others_are_sent() -> None:
    sent: list[tuple[str, bytes]] = []
    batch, broken_below = SendBatch(), BrokenTransport("a", sent)
    broken, second = BatchedTransport(broken_below, batch), BatchedTransport(RecordingTransport("b", sent), batch)
    broken.write(b"1")
    second.write(b"2")
    await asyncio.sleep(0)
    assert (sent, broken_below.is_closed) == ([("b", b"2")], True)
    second.write(b"3")
    await asyncio.sleep(0)
    assert sent == [("b", b"2"), ("b", b"3")]


async def test_what_was_written_before_a_close_is_sent_and_before_an_abort_is_not() -> None:
    first, second, sent = make_pair()
    first.write(b"end")
    first.close()
    second.write(b"end")
    second.abort()
    assert sent == [("a", b"end")]
    await asyncio.sleep(0)
    assert sent == [("a", b"end")]
    assert first.is_closing()
    assert second.is_closing()


async def test_much_is_sent_at_once_and_what_waits_counts_as_unsent() -> None:
    first, _, sent = make_pair()
    first.write(b"." * 1000)
    assert first.get_write_buffer_size() == 1100
    first.write(b"." * (64 << 10))
    assert [(name, len(data)) for name, data in sent] == [("a", 1000 + (64 << 10))]
    assert first.get_write_buffer_size() == 100
    await asyncio.sleep(0)
    assert len(sent) == 1
