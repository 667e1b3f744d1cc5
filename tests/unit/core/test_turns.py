"""Tenants take turns where several wait for the same."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.turns import TurnQueue


def popped(queue: TurnQueue[int]) -> tuple[str, int]:
    tenant, head = next(iter(queue.heads()))
    item = queue.pop(tenant)
    assert item == head
    return tenant, item


@given(st.lists(st.sampled_from("abc")))
def test_nobody_is_served_twice_while_another_waits_and_of_one_the_first_comes_first(tenants: str) -> None:
    queue = TurnQueue[int]()
    for number, tenant in enumerate(tenants):
        queue.add(tenant, number)
    served = [popped(queue) for _ in tenants]
    assert len(queue) == 0
    assert sorted(item for _, item in served) == list(range(len(tenants)))
    for tenant in set(tenants):
        items = [item for other, item in served if other == tenant]
        assert items == sorted(items)
    for index, (tenant, _) in enumerate(served[1:], 1):
        if tenant == served[index - 1][0]:
            assert {other for other, _ in served[index:]} == {tenant}, "only where no other waits"


def test_what_waits_no_more_is_taken_out() -> None:
    queue = TurnQueue[int]()
    for tenant, number in (("a", 1), ("a", 2), ("b", 3)):
        queue.add(tenant, number)
    assert queue.try_remove("a", 1)
    assert not queue.try_remove("a", 1)
    assert queue.try_remove("b", 3)
    assert not queue.try_remove("c", 4)
    assert list(queue.heads()) == [("a", 2)]
    assert len(queue) == 1
