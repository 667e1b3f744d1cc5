"""Turns and loads of a comparison with another server."""

import pytest

from weir.bench.serving.config import LoadConfig
from weir.bench.serving.load import make_jobs
from weir.bench.serving.peers import Comparison, Peer, RequestShape, main, parse_comparison

_PEER = Peer("llama-server", "http://peer", "its-model", {"its_own": 1})


def _comparison(rounds: int) -> Comparison:
    return parse_comparison(LoadConfig("http://weir", "smollm2-135m"), "128/64,16/128", "1,8,32", rounds)


def test_both_sides_take_turns_and_neither_is_always_first() -> None:
    names = [name for name, _ in _comparison(4).loads(_PEER, RequestShape(128, 64), 8)]
    assert names == ["weir", "llama-server", "llama-server", "weir"] * 2


def test_both_sides_of_a_round_get_the_same_prompts_and_no_round_repeats_any() -> None:
    loads = [load for _, load in _comparison(3).loads(_PEER, RequestShape(128, 64), 8)]
    prompts = [[job.prompt for job in make_jobs(load)] for load in loads]
    assert prompts[0] == prompts[1]
    seen = {tuple(prompt) for prompt in (*prompts[0], *prompts[2], *prompts[4])}
    assert len(seen) == 3 * len(prompts[0])


def test_each_side_is_asked_for_cold_prompts_in_its_own_words() -> None:
    loads = dict(_comparison(1).loads(_PEER, RequestShape(16, 128), 32))
    assert (loads["weir"].base_url, loads["weir"].model, dict(loads["weir"].extra_body)) == (
        "http://weir",
        "smollm2-135m",
        {"cache_prompt": False},
    )
    assert (loads["llama-server"].base_url, loads["llama-server"].model) == ("http://peer", "its-model")
    assert dict(loads["llama-server"].extra_body) == {"its_own": 1}


def test_every_slot_of_the_peer_holds_the_longest_request() -> None:
    assert _comparison(1).max_context_tokens == 128 + 64


@pytest.mark.parametrize("shapes", ["128", "128/", "/64", "0/64", "a/b", "128/64,"])
def test_a_bad_shape_is_named(shapes: str) -> None:
    with pytest.raises(ValueError, match="expected INPUT/OUTPUT"):
        parse_comparison(LoadConfig("http://weir", "m"), shapes, "1", 1)


@pytest.mark.parametrize("concurrencies", ["", "0", "1,x", "-1"])
def test_a_bad_concurrency_is_named(concurrencies: str) -> None:
    with pytest.raises(ValueError, match="concurrencies"):
        parse_comparison(LoadConfig("http://weir", "m"), "1/1", concurrencies, 1)


def test_a_comparison_whose_requests_fail_ends_with_1_and_says_whose(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = parse_comparison(LoadConfig("http://127.0.0.1:1", "m"), "1/1", "1", 1)
    assert main(nobody, "vllm", binary="", model_path=None, peer_url="http://127.0.0.1:1", out=None) == 1
    assert "error: weir at 1/1, 1 concurrent: ConnectError" in capsys.readouterr().err
