"""JSON in parts is the JSON that the library makes of the whole; what is long is made beside the event loop."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.world import World

from weir_gateway.frontends.json_parts import dump, dump_array, dump_in_parts

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


@given(VALUES)
def test_parts_come_to_the_same_text(value: object) -> None:
    assert dump_in_parts(value) == dump(value)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 1024, 1025, 3000])
def test_long_lists_are_cut_and_joined(length: int) -> None:
    entries: list[Any] = [None, *({str(index): [index]} for index in range(length))][:length]
    answer = {"choices": [{"logprobs": {"tokens": entries, "offsets": list(range(length))}, "text": "é"}]}
    assert dump_in_parts(answer) == dump(answer)
    assert dump_array(entries) == dump(entries)


@pytest.mark.parametrize(("num_top", "is_beside"), [(0, False), (20, True)])
async def test_an_answer_with_many_log_probabilities_is_rendered_beside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, num_top: int, is_beside: bool
) -> None:
    threads = set()
    token_bytes = world.tokenizer.token_bytes

    def noted(token_id: int) -> bytes:
        threads.add(threading.current_thread())
        return token_bytes(token_id)

    monkeypatch.setattr(world.tokenizer, "token_bytes", noted)
    body = {"prompt": "x" * 200, "prompt_logprobs": num_top}
    async with world.http_client() as http:
        answer = await http.post("/v1/completions", json=body)
    assert len(json.loads(answer.content)["choices"][0]["prompt_logprobs"]) == 200
    assert (threading.main_thread() not in threads) == is_beside
