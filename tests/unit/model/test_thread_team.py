"""Threads of a step do every chunk of every phase once, in order of phases, and wait for nobody who does nothing."""

import threading
import time

import numpy as np
import numpy.typing as npt
import pytest

from weir.model.cpu.core_share import FixedShare
from weir.model.cpu.threads import ThreadTeam, ThreadTeamFailed
from weir.ops.simd.jit import kernel
from weir.ops.simd.phases import PhaseState, chunk_is_done, num_taken, take_chunk, wait_for_phase

Log = npt.NDArray[np.int64]
MOST_CHUNKS = 12


@kernel
def count_phases(log: Log, num_phases: int, state: PhaseState, base: int, num_chunks: int) -> None:
    """log[p, c]: one more than what the chunk's neighbour had in phase p - 1, which must be done by then."""
    phase = 0
    for number in range(num_phases):
        chunk = take_chunk(state, base, phase, num_chunks)
        while chunk >= 0:
            before = 0 if number == 0 else log[number - 1, (chunk + 1) % num_chunks]
            log[number, chunk] += before + 1
            chunk_is_done(state)
            chunk = take_chunk(state, base, phase, num_chunks)
        phase = wait_for_phase(state, base, phase, num_chunks)


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

    def take_mean_others(self) -> float:
        return 0.0


def new_log(num_phases: int) -> Log:
    return np.zeros((num_phases, MOST_CHUNKS), dtype=np.int64)


def check(log: Log) -> int:
    """Every chunk was done once, after all of the phase before; how many chunks a phase had."""
    num_chunks = int(np.count_nonzero(log[0]))
    assert (log[:, :num_chunks] == np.arange(1, len(log) + 1)[:, None]).all()
    assert (log[:, num_chunks:] == 0).all()
    return num_chunks


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_chunk_is_done_once_and_after_all_of_the_phase_before(num_threads: int) -> None:
    team = ThreadTeam(FixedShare(num_threads))
    for num_phases in (1, 2, 500):
        log = new_log(num_phases)
        team.run(lambda *place, log=log, n=num_phases: count_phases(log, n, *place), num_rows=8)
        assert check(log) == (4 * num_threads if num_threads > 1 else 1)


def test_the_number_of_threads_may_change_with_every_piece_of_work() -> None:
    numbers = [1, 3, 2, 1, 1, 3, 3, 2]
    share = ChangingShare(list(numbers))
    team = ThreadTeam(share)
    for num_threads in numbers:
        log = new_log(50)
        team.run(lambda *place, log=log: count_phases(log, 50, *place), num_rows=8)
        assert check(log) == (4 * num_threads if num_threads > 1 else 1)
        assert share.num_under_way == 0


def test_a_thread_that_comes_late_is_not_waited_for_and_finds_nothing_to_do() -> None:
    team = ThreadTeam(FixedShare(2))
    may_come, has_come = threading.Event(), threading.Event()
    caller = threading.get_ident()

    def work(log: Log, state: PhaseState, base: int, num_chunks: int) -> None:
        if threading.get_ident() != caller:
            may_come.wait(10)
        count_phases(log, 50, state, base, num_chunks)
        if threading.get_ident() != caller:
            has_come.set()

    logs = [new_log(50) for _ in range(3)]
    for log in logs:
        team.run(lambda *place, log=log: work(log, *place), num_rows=8)
    may_come.set()
    assert has_come.wait(10)
    for log in logs:
        check(log)


def test_a_chunk_is_taken_by_one_of_many_threads_that_want_it() -> None:
    state = ThreadTeam(FixedShare(1))._state
    taken: list[int] = []

    def take_all() -> None:
        while (chunk := take_chunk(state, base, 0, 4000)) >= 0:
            taken.append(chunk)

    base = num_taken(state)
    threads = [threading.Thread(target=take_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(taken) == list(range(4000))


def test_a_thread_that_fails_ends_the_work_and_is_waited_for_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    team = ThreadTeam(FixedShare(2))
    caller = threading.get_ident()
    has_taken = threading.Event()

    def work(state: PhaseState, base: int, num_chunks: int) -> None:
        if threading.get_ident() == caller:
            has_taken.wait(10)
            count_phases(new_log(10), 10, state, base, num_chunks)
        else:
            take_chunk(state, base, 0, num_chunks)
            has_taken.set()
            time.sleep(0.05)
            raise MemoryError("no memory for this thread")

    with pytest.raises(ThreadTeamFailed):
        team.run(work, num_rows=8)
    assert "no memory for this thread" in caplog.text


def test_work_that_fails_in_the_callers_thread_gives_its_cores_back() -> None:
    share = ChangingShare([1])

    def fail(*place: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        ThreadTeam(share).run(fail, num_rows=1)
    assert share.num_under_way == 0


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        FixedShare(0)
