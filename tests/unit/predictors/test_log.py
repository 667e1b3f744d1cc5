"""From lines of a request log to samples, and to a predictor by the command."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.predictors.words import prompts_and_lengths, word_table
from typer.testing import CliRunner

from weir.cli.app import app
from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.log_record import LogRecord, pack_features, record_from_line
from weir.policy.predictors.predictor_file import load_predictor
from weir.training.samples import LogError, load_samples

TABLE = word_table()
FEATURES = PromptFeatures(TABLE)
PROMPTS, LENGTHS = prompts_and_lengths(TABLE, 40, noise=0.2)
ROWS = FEATURES.of(PROMPTS)


def record(index: int, *, has_tokens: bool) -> LogRecord:
    plain = LogRecord(1.5, "m", len(PROMPTS[index]), int(LENGTHS[index]), 10_000, is_cut=False)
    if has_tokens:
        return replace(plain, prompt_token_ids=tuple(PROMPTS[index]))
    return replace(plain, table_digest=TABLE.digest, features=pack_features(ROWS[index]))


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_record_comes_back_as_it_was(has_tokens: bool) -> None:
    for arrival_s in (None, 1.25):
        written = replace(record(0, has_tokens=has_tokens), arrival_s=arrival_s)
        assert record_from_line(written.to_line()) == written


def test_a_line_without_tokens_holds_none() -> None:
    content = json.loads(record(0, has_tokens=False).to_line())
    assert "prompt_token_ids" not in content
    assert set(content) == {
        *("v", "at_s", "model", "num_prompt_tokens", "num_output_tokens", "max_tokens", "is_cut", "table", "features")
    }


def test_features_train_as_tokens_do(tmp_path: Path) -> None:
    tokens = write(tmp_path / "t", *(record(i, has_tokens=True).to_line() for i in range(40)))
    pooled = write(tmp_path / "f", *(record(i, has_tokens=False).to_line() for i in range(40)))
    one, other = (load_samples([path], FEATURES, "m").samples for path in (tokens, pooled))
    np.testing.assert_array_equal(one.num_output_tokens, other.num_output_tokens)
    np.testing.assert_allclose(one.features, other.features, rtol=1e-3, atol=1e-3)


def test_lines_that_cannot_be_used_are_counted_by_reason(tmp_path: Path) -> None:
    good = record(0, has_tokens=True)
    lines = (
        good.to_line(),
        "\n",
        '{"v": 1}\n',
        '{"v": 7}\n',
        good.to_line()[:40] + "\n",
        replace(good, num_output_tokens=0).to_line(),
        replace(good, model="other").to_line(),
        replace(record(1, has_tokens=False), table_digest="of another").to_line(),
        replace(record(1, has_tokens=False), features=b"\x00" * 6).to_line(),
    )
    loaded = load_samples([write(tmp_path / "log", *lines)], FEATURES, "m")
    assert len(loaded.samples) == 1
    assert loaded.skipped == {"damaged": 6, "of another model": 1, "with features of another token table": 1}


def test_a_log_of_nothing_usable_says_why(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="1 of another model"):
        load_samples([write(tmp_path / "log", record(0, has_tokens=True).to_line())], FEATURES, "other")
    with pytest.raises(LogError, match="there are no lines"):
        load_samples([write(tmp_path / "log", "")], FEATURES, "m")
    with pytest.raises(LogError, match="none"):
        load_samples([tmp_path / "none"], FEATURES, "m")


def test_the_command_makes_a_predictor_of_a_log(tmp_path: Path) -> None:
    source = np.random.default_rng(2)
    lines = []
    for _ in range(150):
        is_long = bool(source.integers(2))
        prompt = (200 if is_long else 20, *source.integers(3, 250, 6).tolist())
        lines.append(
            LogRecord(0.0, "dummy:tiny", 7, 300 if is_long else 20, 512, False, prompt_token_ids=prompt).to_line()
        )
    log, out = write(tmp_path / "log", *lines), tmp_path / "p.npz"
    arguments = ["train-predictor", str(log), "--out", str(out), "--model", "dummy:tiny", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["num_samples"] == 150
    assert report["held_out_tau"] > 0.3
    predictions = load_predictor(out).predict([[200, 9, 9, 9, 9, 9, 9], [20, 9, 9, 9, 9, 9, 9]])
    assert predictions.output_tokens[0] > predictions.output_tokens[1]


def test_the_command_names_a_log_that_is_not_there(tmp_path: Path) -> None:
    arguments = ["train-predictor", str(tmp_path / "none"), "--out", str(tmp_path / "p"), "--model", "dummy:tiny"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "none" in result.output
