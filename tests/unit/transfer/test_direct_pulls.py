"""A pull by copies of the source's memory ends at once, whatever it meets."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from weir.kv.memory.cuda import CudaDriverError
from weir.kv.movers.direct import DirectPull
from weir.kv.movers.pull import PullFailed, WantedPage
from weir.kv.movers.source import NO_CHECKSUM
from weir.wire.v1 import pages_pb2
from weir_transfer.exchange.arena_pulls import Confirming

_LONG_S = 60.0


class _Memory:
    """The source's, and the place of a page in ours: copies nothing, or raises, once it may."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.may_end = threading.Event()
        self.copies = threading.Event()
        self.closed = threading.Event()

    def copy_from(self, memory: object, offset: int) -> None:
        self.copies.set()
        assert self.may_end.wait(_LONG_S)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self.closed.set()

    def wanted(self) -> WantedPage:
        return WantedPage(0, 0, NO_CHECKSUM, cast(Any, self), page_id=0)


@pytest.mark.parametrize("error", [CudaDriverError("no such device"), RuntimeError("odd"), OSError("gone")])
def test_what_a_copy_raises_ends_the_pull(error: Exception) -> None:
    memory = _Memory(error)
    memory.may_end.set()
    pull = DirectPull(cast(Any, memory), 8, lambda _: True, time.monotonic() + _LONG_S)
    pull.want([memory.wanted()])
    with pytest.raises(PullFailed, match=str(error)):
        pull.wait()
    assert memory.closed.wait(_LONG_S)


def test_a_pull_whose_time_is_over_says_so_and_whether_somebody_still_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.kv.movers.direct._END_S", 0.01)
    memory = _Memory()
    pull = DirectPull(cast(Any, memory), 8, lambda _: True, time.monotonic() + 0.05)
    pull.want([memory.wanted()])
    with pytest.raises(PullFailed, match="its time was over; a thread still writes into its pages"):
        pull.finish()
    assert not pull.cancel()
    memory.may_end.set()
    assert memory.closed.wait(_LONG_S)
    with pytest.raises(PullFailed, match=r"its time was over$"):
        pull.finish()


def test_nothing_is_confirmed_for_a_pull_that_was_cancelled() -> None:
    memory, confirmed = _Memory(), list[float]()

    def confirm(timeout_s: float) -> bool:
        confirmed.append(timeout_s)
        return True

    pull = DirectPull(cast(Any, memory), 8, confirm, time.monotonic() + _LONG_S)
    pull.want([memory.wanted()])
    assert memory.copies.wait(_LONG_S)
    cancelling = threading.Thread(target=pull.cancel)
    cancelling.start()
    while pull._pulled.problem is None:
        time.sleep(0.001)
    memory.may_end.set()
    cancelling.join()
    assert memory.closed.wait(_LONG_S)
    assert not confirmed


@pytest.mark.parametrize("error", [grpc.aio.UsageError("Channel is closed."), asyncio.CancelledError()])
async def test_a_source_that_cannot_be_asked_has_confirmed_nothing(error: BaseException) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise error

    confirming = Confirming(
        cast(Any, SimpleNamespace(Confirm=refuse)), pages_pb2.OfferResponse(), asyncio.get_running_loop()
    )
    assert not await asyncio.to_thread(confirming, 1.0)


def test_a_loop_that_is_closed_has_confirmed_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert not Confirming(cast(Any, None), pages_pb2.OfferResponse(), loop)(1.0)
