"""A predictor comes back from its file as it was; whatever else lies there is refused with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.predictors.words import QUICK, prompts_and_lengths, samples_of, word_table

from weir.policy.predictors.predictor import Predictor
from weir.policy.predictors.predictor_file import PredictorFileError, load_predictor, save_predictor
from weir.training.make import Kind, train_predictor

TABLE = word_table()


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return train_predictor(TABLE, samples_of(TABLE, 120, noise=0.3), "words", settings=QUICK)


@pytest.fixture
def path(predictor: Predictor, tmp_path: Path) -> Path:
    save_predictor(tmp_path / "p.npz", predictor)
    return tmp_path / "p.npz"


@pytest.mark.parametrize("kind", ["ranking", "forest"])
def test_a_predictor_comes_back_as_it_was(kind: Kind, tmp_path: Path) -> None:
    made = train_predictor(TABLE, samples_of(TABLE, 120, noise=0.3), "words", kind, settings=QUICK)
    save_predictor(tmp_path / "p.npz", made)
    loaded = load_predictor(tmp_path / "p.npz", TABLE.tokenizer_digest)
    prompts, _ = prompts_and_lengths(TABLE, 30, noise=0.0, seed=4)
    np.testing.assert_array_equal(loaded.predict(prompts).scores, made.predict(prompts).scores)
    np.testing.assert_array_equal(loaded.predict(prompts).output_tokens, made.predict(prompts).output_tokens)
    assert loaded.info == made.info
    assert list(tmp_path.iterdir()) == [tmp_path / "p.npz"]


def test_one_for_another_tokenizer_is_refused(path: Path) -> None:
    with pytest.raises(PredictorFileError, match=r"p\.npz: was made for another tokenizer .*'words'"):
        load_predictor(path, "0" * 32)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PredictorFileError, match=r"none\.npz: cannot be read .*weir train-predictor"):
        load_predictor(tmp_path / "none.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nonsense", b"\x93NUMPY", b"a text, no more"])
def test_what_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.npz").write_bytes(content)
    with pytest.raises(PredictorFileError, match="is not a predictor, or is damaged"):
        load_predictor(tmp_path / "p.npz")


def test_a_file_that_is_cut_off_or_flipped_anywhere_is_refused_or_whole(path: Path) -> None:
    content = path.read_bytes()
    num_refused = 0
    for place in range(0, len(content), max(1, len(content) // 60)):
        for broken in (content[:place], content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :]):
            path.write_bytes(broken)
            try:
                load_predictor(path)
            except PredictorFileError:
                num_refused += 1
    assert num_refused > 60


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    change(arrays)
    np.savez(path, **arrays)
    return path


def with_header(**fields: object) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        header = json.loads(arrays["header"].tobytes()) | fields
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)

    return change


def replaced(name: str, value: np.ndarray) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays.update({name: value})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (with_header(version=9), "is 'weir-predictor' version 9; this is 'weir-predictor' version 2"),
        (with_header(format="other"), "is 'other'"),
        (with_header(kind="oracle"), "is of kind 'oracle'; known are ranking, forest"),
        (with_header(num_training="many"), "is damaged"),
        (lambda arrays: arrays.pop("header"), "has no header"),
        (lambda arrays: arrays.pop("head.w1"), "lacks 'w1'"),
        (lambda arrays: arrays.pop("table.vectors"), "lacks 'vectors'"),
        (replaced("head.w2", np.zeros(3, np.float32)), "w2 is float32"),
        (replaced("head.b1", np.full(65, np.nan, np.float32)), "b1 has numbers that are not finite"),
        (replaced("table.scales", np.zeros(3, np.float32)), "scales is float32"),
        (replaced("table.sign_of", np.full(120, 255, np.uint8)), "at most"),
        (replaced("head.deviations", np.zeros(99, np.float32)), "deviations"),
    ],
)
def test_what_is_wrong_inside_is_said(path: Path, change: Callable[[dict[str, Any]], None], problem: str) -> None:
    with pytest.raises(PredictorFileError, match=problem):
        load_predictor(changed(path, change))


def test_pickles_are_never_read(path: Path) -> None:
    changed(path, replaced("table.extra", np.array([{"a": 1}], dtype=object)))
    with pytest.raises(PredictorFileError, match="is not a predictor, or is damaged"):
        load_predictor(path)
