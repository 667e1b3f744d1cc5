"""What a supervisor writes down, read by somebody else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from weir.core.process import ProcessIdentity
from weir.runtime.private_folder import UnsafeFolder
from weir.runtime.stack.paths import InstancePaths, find_instances
from weir.runtime.stack.state import (
    STATE_VERSION,
    ProcessState,
    StackState,
    identities_of,
    read_boot_id,
    try_find_other_version,
    try_read_state,
    write_state,
)

STATE = StackState(
    instance="weir-1",
    boot_id=read_boot_id(),
    supervisor=ProcessIdentity(10, 100),
    phase="ready",
    started_at=12.5,
    stop_limit_s=60.0,
    endpoints={"gRPC": "127.0.0.1:1"},
    processes=(
        ProcessState("nats", "nats", "ready", ProcessIdentity(11, 101), 0, 13.0, "127.0.0.1:2", "/log"),
        ProcessState("decode-0", "decode", "restarting", None, 3, 14.0, "", "/log"),
    ),
    notes=("the arena is large",),
)


def test_a_state_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write_state(tmp_path / "state.json", STATE)
    assert try_read_state(tmp_path / "state.json") == STATE
    assert identities_of(STATE) == [ProcessIdentity(11, 101)]


def test_pids_of_an_earlier_boot_mean_nothing(tmp_path: Path) -> None:
    write_state(tmp_path / "state.json", replace(STATE, boot_id="before"))
    assert try_read_state(tmp_path / "state.json") is None


@pytest.mark.parametrize("cut", [0, 1, 50, 200])
def test_a_damaged_state_names_no_process(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "state.json"
    write_state(path, STATE)
    path.write_text(path.read_text()[:cut])
    assert try_read_state(path) is None
    path.write_text(json.dumps({"instance": "weir-1"}))
    assert try_read_state(path) is None
    assert try_read_state(tmp_path / "none") is None


def test_instances_are_found_by_their_state(tmp_path: Path) -> None:
    for name in ("b", "a"):
        paths = InstancePaths(tmp_path / name)
        paths.make()
        write_state(paths.state_file, STATE)
    InstancePaths(tmp_path / "ended").make()
    assert find_instances(tmp_path) == ["a", "b"]


def test_folders_are_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = InstancePaths(tmp_path / "run" / "a")
    paths.make()
    assert [oct(folder.stat().st_mode & 0o777) for folder in (paths.folder.parent, paths.folder)] == ["0o700"] * 2
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(UnsafeFolder, match="belongs to another user"):
        paths.make()


def test_the_key_of_this_users_commands_is_new_each_time_and_goes_with_the_stack(tmp_path: Path) -> None:
    paths = InstancePaths(tmp_path / "a")
    assert paths.try_read_admin_key() is None
    paths.make()
    paths.make_admin_key()
    first = paths.try_read_admin_key()
    assert paths.admin_key_file.stat().st_mode & 0o777 == 0o600
    paths.make_admin_key()
    assert paths.try_read_admin_key() not in (None, "", first)
    paths.remove_volatile()
    assert paths.try_read_admin_key() is None


@pytest.mark.parametrize("version", [0, STATE_VERSION + 1])
def test_a_state_of_another_version_names_no_process_and_says_which_it_is(tmp_path: Path, version: int) -> None:
    path = tmp_path / "state.json"
    write_state(path, STATE)
    assert try_find_other_version(path) is None
    document = json.loads(path.read_text())
    document["version"] = version
    if not version:
        del document["version"]
    path.write_text(json.dumps(document))
    assert try_read_state(path) is None
    assert try_find_other_version(path) == version
    path.write_text("[]")
    assert (try_read_state(path), try_find_other_version(path)) == (None, None)
