"""Cost profiles as files."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.sim.loads import PROFILE

from weir.sim.profile import ProfileError, load_profile, profile_names, save_profile


def test_what_is_saved_is_loaded_again_with_its_comment_left_aside(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    profile = replace(PROFILE, bus_ms=0.25, decision_us=7.0, name="2026")
    save_profile(profile, path, comment="Measured by hand.\nTwice.")
    assert path.read_text().startswith("# Measured by hand.\n# Twice.\nname:")
    assert load_profile(path) == profile


def test_those_that_come_with_weir_can_be_used() -> None:
    assert {load_profile(name).name for name in profile_names()} == {"a100-llama3-8b", "h100-llama3-8b"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("num_pages: 2000\n", ""), "num_pages: is missing"),
        (("num_pages: 2000\n", "num_pages: 0\n"), "num_pages 0: must be a whole number of at least 1"),
        (("num_pages: 2000\n", "num_pages: many\n"), "num_pages 'many': must be a number"),
        (("num_pages: 2000\n", "num_pages: 2000\npages: 1\n"), "pages: unknown"),
        (("  base_ms: 5.0\n", ""), "step.base_ms: is missing"),
        (("  base_ms: 5.0\n", "  base_ms: -1\n"), "step.base_ms -1: must be finite"),
        (("  base_ms: 5.0\n", "  base_ms: true\n"), "step.base_ms True: must be a number"),
        (("bus_ms: 0.5\n", "bus_ms: .nan\n"), "bus_ms nan: must be finite"),
        (("step:\n", "steps:\n"), "steps: unknown"),
        (("name: test\n", "name: [\n"), "while parsing"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_field(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / "bad.yaml"
    save_profile(PROFILE, path)
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ProfileError, match="the file: must be a table of name"):
        load_profile(path)


def test_a_profile_that_is_not_there_is_told_beside_those_that_are() -> None:
    with pytest.raises(ProfileError, match="'b200': is no file, and none of a100-llama3-8b, h100-llama3-8b"):
        load_profile("b200")
