"""States are those that the serving decoder computes, wherever they are read."""

from pathlib import Path

import numpy as np
import pytest
from tests.unit.model.int8 import Int8Probe
from tests.unit.model.tiny import TinyLlama, chunk, prompt_ids, save_tiny_llama

from benchmarks.predictors.answers import Answer
from benchmarks.predictors.hidden_states import (
    AGES,
    StateReader,
    StateTable,
    read_states,
    read_token_ids,
    write_token_ids,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reader(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> StateReader:
    return StateReader(tiny.source, (1, 2), 256, tmp_path_factory.mktemp("packed"))


def test_the_last_state_times_the_head_gives_the_logits_that_are_served(
    tiny: TinyLlama, reader: StateReader, tmp_path: Path
) -> None:
    ids = prompt_ids(150, seed=1)
    logits = Int8Probe(tiny.source, tmp_path).run(chunk(0, ids, 0, len(ids), tuple(range(16))))[0]
    head = tiny.model.get_output_embeddings().weight.detach().numpy()
    found = head @ reader.rows_of(ids)[-1, -1]
    assert np.corrcoef(found, logits)[0, 1] > 0.999
    assert int(found.argmax()) == int(logits.argmax())


def test_states_of_a_prefix_do_not_depend_on_what_follows(reader: StateReader) -> None:
    ids = prompt_ids(140, seed=2)
    np.testing.assert_array_equal(reader.rows_of(ids)[:, :60], reader.rows_of(ids[:60]))


def test_along_an_answer_states_are_those_of_the_latest_known_token(reader: StateReader) -> None:
    prompt, answer = prompt_ids(20, seed=3), prompt_ids(40, seed=4)
    states = reader.states(prompt, answer, AGES, first=5)
    rows = reader.rows_of([*prompt, *answer])
    assert len(states.last) == 2, "it has no 64 tokens"
    np.testing.assert_array_equal(states.last[0], rows[:, 19])
    np.testing.assert_array_equal(states.last[1], rows[:, 20 + 32 - 1])
    np.testing.assert_allclose(states.mean, rows[:, 5:20].mean(axis=1), rtol=1e-5)


def test_an_answer_that_ends_at_an_age_has_no_state_there(reader: StateReader) -> None:
    assert len(reader.states(prompt_ids(9, 1), prompt_ids(32, 2), AGES, 0).last) == 1
    assert len(reader.states(prompt_ids(9, 1), prompt_ids(33, 2), AGES, 0).last) == 2


@pytest.mark.parametrize("layers", [(), (2, 1), (0, 1), (1, 3), (1, 1)])
def test_layers_that_the_model_lacks_are_refused(layers: tuple[int, ...], tiny: TinyLlama) -> None:
    with pytest.raises(ValueError, match="must rise from 1 to 2"):
        StateReader(tiny.source, layers, 64)


def test_a_sequence_that_is_too_long_is_refused(reader: StateReader) -> None:
    with pytest.raises(ValueError, match="a sequence of 257 tokens: states are read of 256 at most"):
        reader.rows_of(prompt_ids(257, seed=1))


def test_a_table_and_its_answers_come_back_from_their_files(reader: StateReader, tmp_path: Path) -> None:
    answers = [Answer("s", index, 1 - index, 8, 40, False, tuple(prompt_ids(40, index))) for index in (1, 0)]
    for answer in answers:
        write_token_ids(tmp_path / "ids.jsonl", answer)
    kept = read_token_ids(tmp_path / "ids.jsonl")
    assert sorted(kept, key=lambda a: a.index) == sorted(answers, key=lambda a: a.index)
    table = read_states(reader, [prompt_ids(8, 5), prompt_ids(8, 6)], kept, first=0)
    table.save(tmp_path / "t.npz")
    again = StateTable.load(tmp_path / "t.npz")
    np.testing.assert_array_equal(again.last, table.last)
    assert table.last.shape == (2, len(AGES), 2, 64)
    assert np.isnan(table.last[:, 2:]).all()
    assert not np.isnan(table.last[:, :2]).any()
    assert sorted(again.index.tolist()) == [0, 1]
