"""`weir up` tells its transfer services, and nobody else, where pages outlive their arenas."""

from pathlib import Path

import pytest

from weir.runtime.config import ConfigError
from weir.runtime.extras import PACKAGES, ExtraMissing
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


def test_a_valkey_is_named_to_each_transfer_service_and_its_password_is_not(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("open sesame")
    config = StackConfig(
        page_valkey_url="rediss://valkey.example",
        page_valkey_password_file=str(tmp_path / "password"),
        page_memory_bytes=1 << 30,
        device="interpreter",
        runtime_dir=tmp_path,
    )
    plan = plan_stack(config, 4222)
    for spec in plan.specs:
        flags = dict(zip(spec.command, spec.command[1:], strict=False))
        told = {flag: word for flag, word in flags.items() if flag.startswith(("--page-valkey", "--page-memory"))}
        wanted = {
            "--page-valkey-url": "rediss://valkey.example",
            "--page-valkey-password-file": str(tmp_path / "password"),
            "--page-memory-bytes": str(1 << 30),
        }
        assert told == (wanted if spec.role == "transfer" else {})
        assert "open sesame" not in " ".join(spec.command)


def test_a_valkey_without_encryption_is_named_to_transfer_services_with_the_leave_for_it(tmp_path: Path) -> None:
    config = StackConfig(page_valkey_url="redis://10.0.0.7", page_valkey_insecure=True, runtime_dir=tmp_path)
    [transfer] = [spec for spec in plan_stack(config, 4222).specs if spec.role == "transfer"]
    assert "--page-valkey-insecure" in transfer.command


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"page_memory_bytes": 1 << 30}, "is for arenas on a device"),
        (
            {"page_valkey_url": "redis://10.0.0.7"},
            "page_valkey_url 'redis://10.0.0.7:6379/0': .*set page_valkey_insecure",
        ),
        ({"page_valkey_url": "redis://:secret@h"}, r"page_valkey_url 'redis://\*\*\*@h': has a password in it"),
    ],
)
def test_what_a_transfer_service_would_refuse_the_stack_refuses(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        StackConfig(**settings)  # type: ignore[arg-type]


def test_a_stack_is_not_planned_whose_transfer_services_would_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StackConfig(
        page_valkey_url="rediss://valkey.example", page_valkey_ca_file=str(tmp_path / "ca"), runtime_dir=tmp_path
    )
    with pytest.raises(ConfigError, match=r"page_valkey_ca_file .*: is no file here"):
        plan_stack(config, 4222)
    (tmp_path / "ca").write_text("")
    assert plan_stack(config, 4222).specs
    monkeypatch.setitem(PACKAGES, "valkey", ("no_such_package",))
    with pytest.raises(ExtraMissing, match="page_valkey_url needs no_such_package"):
        plan_stack(config, 4222)
