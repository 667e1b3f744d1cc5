"""Log-probabilities go to a gateway with their tokens, and again when it asks again."""

from weir.core.attempt import Attempt
from weir.core.logprobs import TokenLogprobs
from weir.engine.messages import SequenceKey
from weir.worker.requests.output_collector import OutputCollector

KEY = SequenceKey("a" * 32, Attempt(1))
TOLD = [TokenLogprobs(index, -index / 8, 1) for index in range(6)]


def begun(num_tokens: int, num_prompt: int = 0) -> OutputCollector:
    collector = OutputCollector(KEY, "gateway", next_index=0)
    if num_prompt:
        collector.add_prompt_logprobs(1, TOLD[:num_prompt])
    for index in range(num_tokens):
        collector.add_token(index, index, TOLD[index])
    return collector


def test_each_update_has_those_of_its_own_tokens() -> None:
    collector = begun(2)
    assert collector.take_update(100).logprobs == tuple(TOLD[:2])
    collector.add_token(2, 2, TOLD[2])
    update = collector.take_update(100)
    assert (update.first_index, update.token_ids, update.logprobs) == (2, (2,), (TOLD[2],))


def test_an_update_that_is_cut_short_has_no_more_of_them_than_tokens() -> None:
    collector = begun(5)
    assert collector.take_update(3).logprobs == tuple(TOLD[:3])
    assert collector.take_update(3).logprobs == tuple(TOLD[3:5])


def test_a_gateway_that_asks_again_gets_them_again() -> None:
    collector = begun(3, num_prompt=4)
    collector.take_update(100)
    assert not collector.has_updates
    collector.resume(1)
    update = collector.take_update(100)
    assert (update.first_index, update.logprobs) == (1, tuple(TOLD[1:3]))
    assert (update.first_prompt_index, update.prompt_logprobs) == (1, tuple(TOLD[:4]))


def test_those_of_the_prompt_are_news_without_a_token_and_are_sent_once() -> None:
    collector = begun(0, num_prompt=2)
    news = [collector.has_updates]
    update = collector.take_update(100)
    assert (update.token_ids, update.prompt_logprobs) == ((), tuple(TOLD[:2]))
    news.append(collector.has_updates)
    assert news == [True, False]
    collector.add_prompt_logprobs(3, TOLD[2:4])
    update = collector.take_update(100)
    assert (update.first_prompt_index, update.prompt_logprobs) == (3, tuple(TOLD[2:4]))
