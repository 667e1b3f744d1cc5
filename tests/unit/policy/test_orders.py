"""Each order's own rule, on cases small enough to work out by hand."""

import math
from collections.abc import Mapping, Sequence

import pytest
from tests.contract.policy_requests import waiting

from weir.policy.magnus import LinearServingTime, MagnusParams
from weir.policy.registry import PolicySpec
from weir.policy.seams import Order, Waiting


def order_of(name: str, requests: Sequence[Waiting], now_s: float, params: Mapping[str, float] | None = None) -> str:
    """Ids in the order in which they are taken at one instant."""
    return drained(PolicySpec(name, params or {}).make().order, requests, now_s)


def drained(order: Order, requests: Sequence[Waiting], now_s: float) -> str:
    queue = order.new_queue()
    for request in requests:
        queue.add(request)
    taken = ""
    while (request_id := queue.try_peek(now_s)) is not None:
        queue.take(request_id, now_s)
        taken += request_id
    return taken


def test_first_come_first_served_is_blind_to_everything_else() -> None:
    requests = [waiting("a", 1.0, prompt=9000, due_s=99), waiting("b", 2.0, prompt=1, score=9.0, due_s=2.1)]
    assert order_of("fcfs", requests, 3.0) == "ab"


@pytest.mark.parametrize("name", ["shortest-prompt", "slai"])
def test_the_shortest_prompt_counts_what_no_cache_holds(name: str) -> None:
    cached = Waiting("c", 0.0, 9000, 10, 100, math.inf)
    assert order_of(name, [waiting("a", prompt=500), waiting("b", prompt=20), cached], 1.0) == "cba"


def test_the_highest_score_is_the_shortest_and_goes_first() -> None:
    requests = [waiting("a", score=-2.0), waiting("b", score=5.0), waiting("c", score=0.5)]
    assert order_of("ltr", requests, 1.0) == "bca"


def test_a_request_without_a_score_ranks_as_the_mean_of_those_that_ended() -> None:
    order = PolicySpec("ltr").make().order
    for number, score in enumerate((4.0, 2.0)):
        order.finished(waiting(f"{number}", score=score), 10, 1.0)
    requests = [waiting("a"), waiting("b", score=2.9), waiting("c", score=3.1)]
    assert drained(order, requests, 2.0) == "cab"


def test_whoever_was_passed_over_often_enough_gets_every_other_pick() -> None:
    """Threshold 3, period 2. a, b, c have the worst scores: three picks by score, then a's turn, and so on."""
    requests = [waiting(name, number / 10, score=-1.0 - number) for number, name in enumerate("xyz")]
    requests += [waiting(name, 1.0, score=9.0 - number) for number, name in enumerate("abcdefg")]
    params = {"threshold_picks": 3, "period": 2}
    assert order_of("ltr", requests, 2.0, params) == "abcxdyezfg"
    assert order_of("ltr", requests, 2.0, {"starvation": 0}) == "abcdefgxyz"


def test_who_came_a_moment_ago_has_not_been_passed_over() -> None:
    """Three picks are made before they come; only picks from then on count."""
    queue = PolicySpec("ltr", {"threshold_picks": 3, "period": 1}).make().order.new_queue()
    for name in "abc":
        queue.add(waiting(name, 0.0))
    for name in "abc":
        queue.take(name, 1.0)
    for number, name in enumerate("zvwxy"):
        queue.add(waiting(name, 2.0, score=float(number)))
    taken = ""
    while (request_id := queue.try_peek(3.0)) is not None:
        queue.take(request_id, 3.0)
        taken += request_id
    assert taken == "yxwvz"


def test_a_batch_of_a_bucket_that_runs_dry_is_not_filled_from_another() -> None:
    """b begins a batch of two, of which c is the other, although d came before c."""
    lengths = {"a": 100, "b": 200, "d": 9000, "c": 200}
    requests = [waiting(name, number / 10, prompt=lengths[name]) for number, name in enumerate("abdc")]
    assert order_of("bucketed", requests, 1.0, {"num_buckets": 3, "batch": 2}) == "abcd"


def test_the_fewest_predicted_tokens_go_first_and_what_has_ended_stands_for_no_prediction() -> None:
    order = PolicySpec("srtf").make().order
    requests = [waiting("a"), waiting("b", output=90.0), waiting("c", output=110.0)]
    assert drained(order, requests, 1.0) == "bca"  # nothing has ended: as many as its max_tokens
    order.finished(waiting("z"), 100, 1.0)
    assert drained(order, requests, 1.0) == "bac"


def test_buckets_double_and_are_served_by_the_batch_from_the_oldest_head() -> None:
    """Bounds 128 and 256: a, d in the first; b, e in the second; c, f in the last."""
    lengths = {"a": 128, "b": 129, "c": 257, "d": 1, "e": 256, "f": 9000}
    requests = [waiting(name, number / 10, prompt=lengths[name]) for number, name in enumerate("abcdef")]
    assert order_of("bucketed", requests, 1.0, {"num_buckets": 3, "batch": 2}) == "adbecf"
    assert order_of("bucketed", requests, 1.0, {"num_buckets": 3, "batch": 1}) == "abcdef"


def test_buckets_by_predicted_output() -> None:
    requests = [waiting("a", 0.0, output=500.0), waiting("b", 0.1, output=10.0), waiting("c", 0.2, output=300.0)]
    assert order_of("bucketed", requests, 1.0, {"by_output": 1}) == "acb"


def test_the_highest_response_ratio_goes_first() -> None:
    """Serving a takes 10 s, b 1 s, c 0.1 s. After (12, 1.5, 0.1) s of waiting the ratios are 1 + (1.2, 1.5, 1)."""
    params = {"prefill_token_ms": 0, "decode_token_ms": 10, "resolution": 0.01}
    requests = [waiting("a", 0.0, output=1000.0), waiting("b", 10.5, output=100.0), waiting("c", 11.9, output=10.0)]
    assert order_of("magnus", requests, 12.0, params) == "bac"
    assert order_of("magnus", requests, 11.99, params) == "bac"
    assert order_of("magnus", requests, 12.2, params) == "cba"


def test_whoever_comes_or_leaves_at_the_very_moment_counts() -> None:
    queue = PolicySpec("magnus").make().order.new_queue()
    queue.add(waiting("young", 5.0))
    assert queue.try_peek(10.0) == "young"
    queue.add(waiting("old", 1.0))
    assert queue.try_peek(10.0) == "old"
    queue.discard("old")
    assert queue.try_peek(10.0) == "young"


def test_serving_times_are_learned_from_requests_that_ended() -> None:
    """Prefilling 1,000 tokens takes 0.5 s and decoding one 20 ms; the estimator begins with 20 ms and 15 ms."""
    fit = LinearServingTime(MagnusParams())
    assert fit.seconds(1000, 100) == pytest.approx(0.02 + 1.5)
    for number in range(800):
        prompt, output = 100 + 700 * (number % 5), 10 + 90 * (number % 7)
        fit.observe(prompt, output, 0.0005 * prompt + 0.02 * output)
    assert fit.seconds(1000, 100) == pytest.approx(2.5, rel=0.02)


def test_what_ends_tells_the_order_how_long_it_was_served_since_it_was_taken() -> None:
    """Each token takes 30 ms, not the 15 ms that the estimator begins with."""
    order = PolicySpec("magnus").make().order
    queue = order.new_queue()
    for number in range(640):
        request = waiting("a", 0.0, prompt=10, output=10.0 + number % 9 * 50)
        queue.add(request)
        queue.take("a", 100.0)
        num_output_tokens = 10 + number % 9 * 50
        order.finished(request, num_output_tokens, 100.0 + 0.03 * num_output_tokens)
    assert order.rank(waiting("b", prompt=10, output=200.0)) == pytest.approx(6.0, rel=0.05)


def test_the_earliest_deadline_goes_first_and_who_has_none_is_due_by_default() -> None:
    requests = [waiting("a", 0.0), waiting("b", 0.0, due_s=31.0), waiting("c", 5.0, due_s=6.0), waiting("d", 5.0)]
    assert order_of("edf", requests, 5.0) == "cabd"


def test_the_hybrid_weighs_deadlines_with_lengths() -> None:
    """Keys 10 + 0.001 * 3000 = 13 and 12 + 0.001 * 100 = 12.1; without alpha 10 and 12."""
    requests = [waiting("a", due_s=10.0, prompt=3000), waiting("b", due_s=12.0, prompt=100)]
    assert order_of("hybrid", requests, 0.0, {"alpha_s_per_token": 0.001}) == "ba"
    assert order_of("hybrid", requests, 0.0, {"alpha_s_per_token": 0}) == "ab"


def test_who_cannot_meet_a_deadline_any_more_goes_behind_all_that_can() -> None:
    """1,000 tokens a second: at 2 s a needs until 5 s and is late, b and c have time."""
    requests = [waiting("a", due_s=4.9, prompt=3000), waiting("b", due_s=6.0), waiting("c", due_s=7.0)]
    params = {"alpha_s_per_token": 0, "tokens_per_s": 1000}
    assert order_of("hybrid", requests, 2.0, params) == "bca"
    assert order_of("hybrid", requests, 1.8, params) == "abc"
    assert order_of("hybrid", requests, 2.0, params | {"relegation": 0}) == "abc"


def test_reading_speed_is_what_was_taken_while_others_waited() -> None:
    """It begins at 1,000 tokens a second and sees 100: soon 300 tokens do not fit into two seconds."""
    order = PolicySpec("hybrid", {"alpha_s_per_token": 0, "tokens_per_s": 1000}).make().order
    queue = order.new_queue()
    for number in range(400):
        queue.add(waiting(f"n{number:03}", 0.0, prompt=100, due_s=1e6))
    for number in range(400):
        request_id = queue.try_peek(number * 1.0)
        assert request_id is not None
        queue.take(request_id, number * 1.0)
    late, timely = waiting("a", 500.0, prompt=300, due_s=502.0), waiting("b", 500.0, prompt=100, due_s=503.0)
    assert drained(order, [late, timely], 500.0) == "ba"


def test_reading_speed_is_a_mean_that_decays_with_each_request() -> None:
    """Ten seconds at 1,000 tokens a second, then one with 100: (9,950 + 100) / (9.95 + 1) = 918 tokens a second."""

    def seen(at_s: Sequence[float]) -> Order:
        order = PolicySpec("hybrid", {"alpha_s_per_token": 0, "tokens_per_s": 1000}).make().order
        for begins_s in at_s:
            queue = order.new_queue()
            for number in range(2):
                queue.add(waiting(f"n{number}", begins_s, prompt=100, due_s=1e6))
            for number, now_s in enumerate((begins_s, begins_s + 1)):
                queue.take(f"n{number}", now_s)
        return order

    def order_at(order: Order, ahead_s: float) -> str:
        late = waiting("a", 900.0, prompt=300, due_s=900.0 + ahead_s)
        return drained(order, [late, waiting("b", 900.0, prompt=1, due_s=901.0)], 900.0)

    assert order_at(seen([0.0]), 0.326) == "ba"
    assert order_at(seen([0.0]), 0.328) == "ab"
    idle_between = seen([0.0, 500.0])  # 849 tokens a second by two readings; what lay between them was none
    assert order_at(idle_between, 0.352) == "ba"
    assert order_at(idle_between, 0.355) == "ab"
