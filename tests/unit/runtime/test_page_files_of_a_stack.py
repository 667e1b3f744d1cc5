"""`weir up` tells its transfer services, and nobody else, where pages outlive their arenas."""

from pathlib import Path

import pytest

from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.plan import plan_stack


def test_each_transfer_service_is_told_the_folder_and_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_stack(StackConfig(page_files_dir="pages", page_files_bytes=1 << 30, runtime_dir=tmp_path), 4222)
    for spec in plan.specs:
        flags = dict(zip(spec.command, spec.command[1:], strict=False))
        told = flags.get("--page-files-dir"), flags.get("--page-files-bytes")
        assert told == ((str(tmp_path / "pages"), str(1 << 30)) if spec.role == "transfer" else (None, None))


def test_without_a_folder_nothing_is_said_of_files(tmp_path: Path) -> None:
    plan = plan_stack(StackConfig(runtime_dir=tmp_path), 4222)
    assert not [word for spec in plan.specs for word in spec.command if "page-files" in word]
