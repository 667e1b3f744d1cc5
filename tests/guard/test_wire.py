"""The generated code is what `proto/` says."""

from pathlib import Path

from proto.generate import GENERATED_ROOT, generate


def test_the_generated_code_has_not_drifted_from_proto(tmp_path: Path) -> None:
    generate(tmp_path / "v1")
    fresh = {path.name: path.read_text() for path in (tmp_path / "v1").iterdir()}
    kept = {path.name: path.read_text() for path in GENERATED_ROOT.iterdir() if path.suffix in {".py", ".pyi"}}
    changed = sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))
    assert changed == [], "run `make proto`"
