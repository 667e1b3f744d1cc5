"""What is sent: random lengths, shared prefixes, chats, ShareGPT, traces by their form."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bench.serving.arrivals import ArrivalPlan
from weir.bench.serving.config import LoadConfig
from weir.bench.serving.datasets import MultiTurn, PrefixRepetition, RandomPrompts, TraceReplay
from weir.bench.serving.jobs import as_text
from weir.bench.serving.load import make_jobs
from weir.bench.serving.sharegpt import ShareGpt
from weir.sim.workloads.trace_file import TraceError


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0, 0.99), st.integers(0, 20), st.integers(0, 5))
def test_random_lengths_lie_within_the_ratio_behind_one_prefix(
    input_len: int, output_len: int, ratio: float, prefix_len: int, seed: int
) -> None:
    dataset = RandomPrompts(input_len, output_len, ratio, prefix_len)
    requests = dataset.requests(12, seed)
    assert requests == dataset.requests(12, seed)
    for request in requests:
        own = len(request.prompt) - prefix_len
        assert max(1, (1 - ratio) * input_len) <= own <= max(1, (1 + ratio) * input_len)
        assert max(1, (1 - ratio) * output_len) <= request.output_len <= max(1, (1 + ratio) * output_len)
    assert len({tuple(request.prompt[:prefix_len]) for request in requests}) == 1


def test_every_prefix_comes_as_often_and_every_suffix_is_its_own() -> None:
    requests = PrefixRepetition(8, 4, num_prefixes=5, output_len=3).requests(20, seed=1)
    prefixes = [tuple(request.prompt[:8]) for request in requests]
    assert sorted(Counter(prefixes).values()) == [4] * 5
    assert prefixes[:5] != prefixes[5:10]
    assert len({tuple(request.prompt[8:]) for request in requests}) == 20
    with pytest.raises(ValueError, match="prefix-repetition-num-prefixes 5"):
        PrefixRepetition(num_prefixes=5).requests(4, seed=1)


def test_chats_have_as_many_turns_in_all_as_were_asked_for() -> None:
    chats = MultiTurn(3, system_len=5, user_len=7, output_len=9, pause_s=0.5).requests(8, seed=2)
    assert [chat.num_turns for chat in chats] == [3, 3, 2]
    assert len({chat.system for chat in chats}) == 1
    assert len(chats[0].system.split()) == 5
    assert len(chats[0].follow_ups[0].text.split()) == 7
    assert all(turn.pause_s > 0 and turn.output_len == 9 for chat in chats for turn in chat.follow_ups)


def test_chats_need_a_backend_that_has_turns() -> None:
    with pytest.raises(ValueError, match="need openai-chat or grpc-chat"):
        make_jobs(LoadConfig("http://x", "m", dataset=MultiTurn()))


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=30), st.integers(0, 30))
def test_prompts_that_begin_alike_do_so_as_words(ids: list[int], shared: int) -> None:
    other = [*ids[:shared], *[token_id + 1 for token_id in ids[shared:]]]
    words, others = as_text(ids).split(), as_text(other).split()
    assert len(words) == len(ids)
    assert words[:shared] == others[:shared]


def conversations(folder: Path) -> Path:
    turns = [("What is a weir, and where is one built?", "A low wall across a river." * 3), ("Hi", "Hello there, you")]
    entries = [{"id": "x", "conversations": [{"from": "human", "value": value} for value in pair]} for pair in turns]
    path = folder / "sharegpt.json"
    path.write_text(json.dumps([*entries, {"id": "y", "conversations": []}]))
    return path


def test_conversations_are_sent_as_they_are_and_too_short_ones_left_out(tmp_path: Path) -> None:
    path = conversations(tmp_path)
    (request,) = ShareGpt(path).requests(10, seed=0)
    assert request.prompt == "What is a weir, and where is one built?"
    assert request.output_len == 20  # 78 characters
    assert [one.output_len for one in ShareGpt(path, output_len=7).requests(10, seed=0)] == [7]


def test_lengths_alone_are_a_load_too(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{n},{2 * n}\n" for n in range(1, 31)))
    requests = ShareGpt(path, prompt_scale=0.5).requests(30, seed=1)
    assert sorted(len(request.prompt) for request in requests) == [2 * n for n in range(1, 31)]
    assert all(request.output_len == len(request.prompt) for request in requests)
    assert requests != ShareGpt(path, prompt_scale=0.5).requests(30, seed=2)
    assert len(ShareGpt(path).requests(4, seed=1)) == 4


@pytest.mark.parametrize("text", ["{}", "[1]", "nonsense", '[{"conversations": [{"value": "a"}]}]'])
def test_a_file_that_is_no_sharegpt_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"wrong\.json"):
        ShareGpt(path).requests(3, seed=0)


def mooncake(folder: Path) -> Path:
    rows = [{"timestamp": 3000 * n, "input_length": 600, "output_length": 5, "hash_ids": [0, n + 1]} for n in range(4)]
    path = folder / "mooncake.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def test_a_trace_is_of_the_form_that_was_named_and_keeps_its_times_or_not(tmp_path: Path) -> None:
    path = mooncake(tmp_path)
    with pytest.raises(ValueError, match=r"dataset-name azure: .* is of the form mooncake"):
        TraceReplay(path, trace_format="azure").requests(4, seed=0)
    real = make_jobs(LoadConfig("http://x", "m", dataset=TraceReplay(path, trace_format="mooncake")))
    scaled = make_jobs(LoadConfig("http://x", "m", dataset=TraceReplay(path, time_scale=0.25)))
    assert [job.at_s for job in scaled] == pytest.approx([job.at_s / 4 for job in real])
    assert real[0].prompt[:512] == real[3].prompt[:512] != real[3].prompt[88:]
    lengths = TraceReplay(path, is_self_timed=False)
    timed = make_jobs(LoadConfig("http://x", "m", dataset=lengths, arrivals=ArrivalPlan(10.0)))
    assert timed[-1].at_s == pytest.approx(0.3)
