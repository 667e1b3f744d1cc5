"""No bytes do worse to a reader than to be refused, in bounded time and memory. The budget here is small, and the
inputs are the same each time: `make fuzz` looks for new ones, and those that found something are kept in `corpus`."""

import mmap
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.all_targets import TARGETS
from tests.fuzz.target import CORPUS, Check, Finding, Target, run_input, simple


@pytest.fixture(scope="module", params=list(TARGETS.values()), ids=list(TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    found = request.param
    assert isinstance(found, Target)
    return found


@pytest.fixture(scope="module")
def check(target: Target) -> Iterator[Check]:
    with target.open() as opened:
        yield opened


def test_every_folder_of_the_corpus_is_of_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= TARGETS.keys()


def test_an_input_that_takes_too_much_memory_is_found_after_a_larger_one_too() -> None:
    def take_as_much(data: bytes) -> None:
        num_bytes = int(data) << 20
        with mmap.mmap(-1, num_bytes) as memory:  # not of the heap, which may have kept as much of what was freed
            for offset in range(0, num_bytes, mmap.PAGESIZE):
                memory[offset] = 1

    hungry = Target("hungry", simple(take_as_much), (), max_growth_bytes=8 << 20)
    for data in (b"64", b"16"):
        with pytest.raises(Finding, match="too large"):
            run_input(hungry, take_as_much, data)
    run_input(hungry, take_as_much, b"2")


def test_inputs_that_are_kept_do_nothing_worse_than_be_refused(target: Target, check: Check) -> None:
    for data in target.kept_inputs():
        run_input(target, check, data)


def test_random_inputs_do_nothing_worse_than_be_refused(target: Target, check: Check) -> None:
    @settings(max_examples=target.ci_examples, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(st.binary(max_size=min(target.max_bytes, 256)))
    def run(data: bytes) -> None:
        run_input(target, check, data)

    run()
