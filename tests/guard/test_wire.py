"""The generated code is what `proto/` says, and `proto/` breaks nobody who speaks the released protocol."""

import shutil
import subprocess
import sys
from pathlib import Path

from proto.generate import GENERATED_ROOT, PROTO_ROOT, generate

BASELINE = PROTO_ROOT / "baseline.binpb"


def find_breaking_changes(proto_root: Path) -> str:
    """What `buf breaking` finds against the released protocol; empty when nothing is broken."""
    buf = Path(sys.executable).parent / "buf"
    command = [str(buf), "breaking", str(proto_root), "--against", str(BASELINE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 100), done.stderr
    return done.stdout


def test_the_generated_code_has_not_drifted_from_proto(tmp_path: Path) -> None:
    generate(tmp_path / "v1")
    fresh = {path.name: path.read_text() for path in (tmp_path / "v1").iterdir()}
    kept = {path.name: path.read_text() for path in GENERATED_ROOT.iterdir() if path.suffix in {".py", ".pyi"}}
    changed = sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))
    assert changed == [], "run `make proto`"


def test_a_field_that_is_gone_breaks_the_released_protocol(tmp_path: Path) -> None:
    changed = Path(shutil.copytree(PROTO_ROOT, tmp_path / "proto", ignore=shutil.ignore_patterns("*.binpb")))
    assert find_breaking_changes(changed) == "", "raise WIRE_VERSION, then run `make proto-baseline`"
    types = changed / "weir" / "v1" / "types.proto"
    types.write_text(types.read_text().replace("  uint32 num_cached_tokens = 3;\n", ""))
    assert 'field "3" with name "num_cached_tokens" on message "Usage" was deleted' in find_breaking_changes(changed)
