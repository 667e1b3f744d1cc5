"""`weir bench step` measures real steps of the model that it is given."""

import json

import pytest
from tests.unit.model.tiny import TinyLlama

from weir.bench import step


def test_the_report_names_each_kind_of_step_with_its_tokens_a_second(
    tiny: TinyLlama, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step.main(str(tiny.folder), json_output=True, num_threads=1, precision="fp32") == 0
    report = json.loads(capsys.readouterr().out)
    assert [found["name"] for found in report["steps"]] == [
        "prefill, 128",
        "prefill, 256",
        "decode, 1",
        "decode, 8",
        "decode, 32",
    ]
    assert [found["num_tokens"] for found in report["steps"]] == [128, 256, 1, 8, 32]
    for found in report["steps"]:
        assert 0 < found["fastest_ms"] <= found["median_ms"] <= found["slowest_ms"]
        assert found["tokens_a_second"] == pytest.approx(found["num_tokens"] / found["median_ms"] * 1e3)
        floor_ms = report["weights_bytes"] / report["bandwidth_bytes_a_second"] * 1e3
        assert found["floor_ms"] == pytest.approx(floor_ms)


def test_the_weights_a_step_reads_are_counted_once(tiny: TinyLlama) -> None:
    report = step.measure(str(tiny.folder), num_threads=1, precision="fp32")
    # tied: the embedding is read as the output matrix, and its rows that are looked up are not counted again
    assert report.weights_bytes == 4 * sum(parameter.numel() for parameter in tiny.model.parameters())


@pytest.mark.timeout(600)  # compiles a forward pass with clocks
def test_the_parts_of_an_int8_step_add_up_to_the_step(tiny: TinyLlama) -> None:
    report = step.measure(str(tiny.folder), num_threads=2, precision="int8")
    assert [split.name for split in report.splits] == [found.name for found in report.steps]
    for split in report.splits:
        assert sum(split.parts_ms.values()) == pytest.approx(split.whole_ms)
        idle = {"waiting", "Python"}
        assert all(part_ms > 0 for part, part_ms in split.parts_ms.items() if part not in idle), split.name


def test_a_table_is_printed_for_people(tiny: TinyLlama, capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(str(tiny.folder), num_threads=1) == 0
    printed = capsys.readouterr().out
    assert "decode, 32" in printed
    assert "GB/s" in printed


def test_a_model_that_is_not_there_ends_with_1_and_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main("gpt-17") == 1
    assert "no model 'gpt-17'" in capsys.readouterr().err
