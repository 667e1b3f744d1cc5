"""Threads of a step wait for each other at every barrier, however many there are, and never for one that has failed."""

import numpy as np
import numpy.typing as npt
import pytest

from weir.model.core_share import FixedShare
from weir.model.crew import Crew, CrewFailed
from weir.ops.simd.barrier import BarrierState, wait_for_all
from weir.ops.simd.jit import kernel

Log = npt.NDArray[np.int64]


@kernel
def count_rounds(log: Log, num_rounds: int, barrier: BarrierState, base: int, thread: int, num_threads: int) -> None:
    """log[r, t]: what thread t sees of its neighbour's work of round r - 1, which must be done by then."""
    passed = 0
    neighbour = (thread + 1) % num_threads
    for number in range(num_rounds):
        log[number, thread] = 1 if number == 0 else log[number - 1, neighbour] + 1
        passed = wait_for_all(barrier, base, passed, num_threads)


class ChangingShare:
    """As many threads as the list says, one entry a piece of work."""

    def __init__(self, numbers: list[int]) -> None:
        self.most = max(numbers)
        self.num_under_way = 0
        self._numbers = numbers

    def begin(self) -> int:
        self.num_under_way += 1
        return self._numbers.pop(0)

    def end(self) -> None:
        self.num_under_way -= 1


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_nobody_passes_a_barrier_before_all_are_there(num_threads: int) -> None:
    crew = Crew(FixedShare(num_threads))
    for num_rounds in (1, 2, 1000):
        log = np.zeros((num_rounds, num_threads), dtype=np.int64)
        crew.run(lambda *place, log=log, n=num_rounds: count_rounds(log, n, *place))
        assert (log == np.arange(1, num_rounds + 1)[:, None]).all()


def test_the_number_of_threads_may_change_with_every_piece_of_work() -> None:
    numbers = [1, 3, 2, 1, 1, 3, 3, 2]
    share = ChangingShare(list(numbers))
    crew = Crew(share)
    for num_threads in numbers:
        log = np.zeros((50, 3), dtype=np.int64)
        crew.run(lambda *place, log=log: count_rounds(log, 50, *place))
        assert (log[:, :num_threads] == np.arange(1, 51)[:, None]).all()
        assert (log[:, num_threads:] == 0).all()
        assert share.num_under_way == 0


def test_a_thread_that_fails_ends_the_work_and_is_waited_for_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    crew = Crew(FixedShare(2))
    log = np.zeros((10, 2), dtype=np.int64)

    def work(barrier: BarrierState, base: int, thread: int, num_threads: int) -> None:
        if thread == 1:
            raise MemoryError("no memory for this thread")
        count_rounds(log, 10, barrier, base, thread, num_threads)

    with pytest.raises(CrewFailed):
        crew.run(work)
    assert "no memory for this thread" in caplog.text


def test_work_that_fails_in_the_callers_thread_gives_its_cores_back() -> None:
    share = ChangingShare([1])

    def fail(*place: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        Crew(share).run(fail)
    assert share.num_under_way == 0


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        FixedShare(0)
