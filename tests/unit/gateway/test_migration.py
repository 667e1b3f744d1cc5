"""What becomes of a migration, whatever is told and whenever."""

from hypothesis import given
from hypothesis import strategies as st

from weir.bus.messages import Placement
from weir.wire.v1 import types_pb2, worker_pb2
from weir_gateway.requests.dispatch_count import DispatchCount
from weir_gateway.requests.migration import Migration, MigrationSettings, MigrationVerdict

SETTINGS = MigrationSettings(near_tokens=6, far_tokens=32, first_answer_s=3, patience_s=4, longest_s=8)
PLACEMENT = Placement(2, "w", "w:1", "w", "w:1", num_reserved_pages=9)


def begun() -> Migration:
    return Migration(PLACEMENT, "there:1", 100.0, SETTINGS)


def told(num_tokens: int, problem: str = "", dispatch: int = 2) -> worker_pb2.StagedPages:
    attempt = types_pb2.Attempt(dispatch=dispatch)
    return worker_pb2.StagedPages(request_id="r", attempt=attempt, num_tokens=num_tokens, problem=problem)


def test_it_waits_for_the_page_that_leaves_little() -> None:
    migration = begun()
    migration.staged(told(64))
    assert migration.verdict(71, 100.1) is MigrationVerdict.WAIT
    migration.staged(told(80))
    assert migration.verdict(83, 100.4) is MigrationVerdict.SWITCH


def test_where_pages_come_too_slowly_it_goes_with_more_left_then_not_at_all() -> None:
    migration = begun()
    migration.staged(told(64))
    assert migration.verdict(96, 103.9) is MigrationVerdict.WAIT
    assert migration.verdict(96, 104.0) is MigrationVerdict.SWITCH
    assert migration.verdict(97, 104.0) is MigrationVerdict.WAIT
    assert migration.verdict(97, 108.0) is MigrationVerdict.ABANDON


def test_a_host_that_says_nothing_is_not_waited_for() -> None:
    assert begun().verdict(10, 102.9) is MigrationVerdict.WAIT
    assert begun().verdict(10, 103.0) is MigrationVerdict.ABANDON


def test_a_host_that_is_lost_ends_it_however_much_is_there() -> None:
    migration = begun()
    migration.staged(told(64))
    migration.fail("lost")
    assert migration.verdict(65, 100.1) is MigrationVerdict.ABANDON


_EVENTS = st.one_of(
    st.tuples(st.just("staged"), st.integers(0, 40), st.sampled_from(["", "", "", "no more"]), st.integers(1, 3)),
    st.tuples(st.just("tokens"), st.integers(0, 40), st.just(""), st.just(0)),
    st.tuples(st.just("fail"), st.just(0), st.just("lost"), st.just(0)),
)


@given(st.integers(1, 400), st.lists(st.tuples(_EVENTS, st.floats(0, 2)), max_size=30))
def test_it_ends_in_time_and_never_switches_with_much_left(
    num_tokens: int, events: list[tuple[tuple[str, int, str, int], float]]
) -> None:
    migration, now_s, staged, is_lost = begun(), 100.0, None, False
    for (what, amount, problem, dispatch), passed_s in [*events, (("tokens", 0, "", 0), SETTINGS.longest_s)]:
        now_s += passed_s
        if what == "staged":
            pages = 16 * min(amount, (num_tokens - 1) // 16)
            migration.staged(told(pages, problem, dispatch))
            if dispatch == PLACEMENT.dispatch and not problem:
                staged = max(staged or 0, pages)
        elif what == "tokens":
            num_tokens += amount
        else:
            migration.fail(problem)
            is_lost, staged = True, None
        verdict = migration.verdict(num_tokens, now_s)
        if verdict is MigrationVerdict.SWITCH:
            assert staged is not None, "nobody has said that anything is there"
            assert num_tokens - staged <= SETTINGS.far_tokens
            return
        if verdict is MigrationVerdict.ABANDON:
            return
        assert not is_lost
        assert now_s - 100.0 < SETTINGS.longest_s
    raise AssertionError("it neither goes nor is given up")


@given(st.lists(st.sampled_from(["again", "take", "move"]), max_size=40))
def test_numbers_of_dispatches_rise_and_moves_do_not_count(steps: list[str]) -> None:
    count, taken, num_again = DispatchCount(), list[int](), 0
    for step in steps:
        before = count.present
        if step == "take":
            taken.append(count.take())
        elif step == "move" and taken and taken[-1] > count.present:
            count.move_to(taken[-1])
            assert count.present > before
        elif step == "again":
            count.begin_next(is_started=True, has_new_tokens=True)
            num_again += 1
            assert count.present > max([before, *taken])
    assert count.num == 1 + num_again


def test_a_move_ends_the_row_of_dispatches_in_vain() -> None:
    count = DispatchCount()
    count.begin_next(is_started=True, has_new_tokens=False)
    count.begin_next(is_started=False, has_new_tokens=False)
    count.move_to(count.take())
    assert count.num_fruitless(is_started=True, has_new_tokens=False) == 1
    assert count.num_unreached(is_started=False) == 1
