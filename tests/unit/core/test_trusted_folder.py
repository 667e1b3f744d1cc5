"""Kernels are loaded from folders that nobody else can write to; any other is refused, with what to do."""

import grp
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weir.core import trusted_folder
from weir.core.trusted_folder import UntrustedFolder, make_trusted_folder

ADVICE = "set WEIR_CACHE to a folder of your own"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """One that is good, with a file in it that others may read."""
    folder = tmp_path / "cache" / "kernels" / "avx2-1f"
    make_trusted_folder(folder, tmp_path / "cache", ADVICE)
    (folder / "attention.nbi").write_bytes(b"index")
    return tmp_path / "cache"


def check(cache: Path) -> None:
    make_trusted_folder(cache / "kernels" / "avx2-1f", cache, ADVICE)


def test_what_is_made_is_this_users_alone_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_trusted_folder(tmp_path / "a" / "b" / "c", tmp_path / "a", ADVICE)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")] == [0o700] * 3


def test_one_that_others_may_read_is_good(cache: Path) -> None:
    for folder in (cache, cache / "kernels", cache / "kernels" / "avx2-1f"):
        folder.chmod(0o755)
    check(cache)


@pytest.mark.parametrize("name", ["", "kernels", "kernels/avx2-1f"])
@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777, 0o775])
def test_one_that_others_may_write_is_refused_by_its_name_and_mode(
    cache: Path, name: str, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trusted_folder, "_is_own_group", lambda gid: False)
    path = cache / name
    path.chmod(mode)
    with pytest.raises(UntrustedFolder) as refused:
        check(cache)
    assert refused.value.message.startswith(f"{path} has mode {mode:04o}: ")
    assert f"`chmod go-w {path}`" in refused.value.message
    assert refused.value.message.endswith(ADVICE)


def test_files_and_folders_in_it_are_looked_at_where_others_may_reach_them(cache: Path) -> None:
    folder = cache / "kernels" / "avx2-1f"
    (folder / "attention.nbi").chmod(0o666)
    check(cache)  # nobody else can come there
    folder.chmod(0o755)
    with pytest.raises(UntrustedFolder, match=r"attention\.nbi has mode 0666"):
        check(cache)
    (folder / "attention.nbi").chmod(0o644)
    (folder / "__pycache__").mkdir(mode=0o755)
    (folder / "__pycache__").chmod(0o777)
    with pytest.raises(UntrustedFolder, match="__pycache__ has mode 0777"):
        check(cache)


def test_the_group_of_the_same_name_with_nobody_else_in_it_may_write(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.chmod(0o775)
    for members, is_good in (([], True), (["ada"], True), (["ada", "eve"], False)):
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: _Named(pw_name="ada"))
        monkeypatch.setattr(pwd, "getpwall", list)
        group = _Named(gr_name="ada", gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        assert refuses(lambda: check(cache)) != is_good
    group = _Named(gr_name="ada", gr_mem=[])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    for eves_gid, is_good in ((cache.stat().st_gid, False), (cache.stat().st_gid + 1, True)):
        monkeypatch.setattr(pwd, "getpwall", lambda gid=eves_gid: [_Named(pw_name="eve", pw_gid=gid)])
        assert refuses(lambda: check(cache)) != is_good
    monkeypatch.setattr(grp, "getgrgid", lambda gid: _Named(gr_name="users", gr_mem=[]))
    assert refuses(lambda: check(cache))


def test_all_users_are_asked_for_once_however_many_files_the_group_may_write(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: _Named(pw_name="ada"))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: _Named(gr_name="ada", gr_mem=[]))
    questions: list[str] = []

    def answer() -> list[_Named]:
        questions.append("who?")
        return []

    monkeypatch.setattr(pwd, "getpwall", answer)
    folder = cache / "kernels" / "avx2-1f"
    (folder / "sampling.nbi").touch()
    for path in (cache, cache / "kernels", folder, *folder.iterdir()):
        path.chmod(0o775)
    check(cache)
    assert len(questions) == 1
    check(cache)
    assert len(questions) == 2, "groups may have changed"


def test_above_it_a_folder_of_all_must_have_the_sticky_bit(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    make_trusted_folder(shared / "cache" / "k", shared / "cache", ADVICE)
    shared.chmod(0o777)
    with pytest.raises(UntrustedFolder, match=f"{shared} has mode 0777"):
        make_trusted_folder(shared / "cache" / "k", shared / "cache", ADVICE)


def test_a_link_leads_to_a_folder_that_is_looked_at_in_its_place(cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "open" / "kernels"
    elsewhere.mkdir(parents=True)
    (cache / "kernels" / "avx2-1f" / "attention.nbi").unlink()
    (cache / "kernels" / "avx2-1f").rmdir()
    (cache / "kernels").rmdir()
    (cache / "kernels").symlink_to("../open/kernels")
    check(cache)
    assert (elsewhere / "avx2-1f").is_dir()
    elsewhere.chmod(0o1777)
    with pytest.raises(UntrustedFolder, match=f"{elsewhere} has mode 1777"):
        check(cache)
    elsewhere.chmod(0o755)
    elsewhere.parent.chmod(0o777)
    with pytest.raises(UntrustedFolder, match=f"{elsewhere.parent} has mode 0777"):
        check(cache)
    (cache / "loop").symlink_to("loop")
    with pytest.raises(UntrustedFolder, match="cannot be made or read"):
        make_trusted_folder(cache / "loop" / "k", cache, ADVICE)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", ["", "kernels", "kernels/avx2-1f"])
@pytest.mark.parametrize("is_link", [False, True])
def test_one_that_is_another_users_or_a_link_of_his_is_refused(cache: Path, name: str, is_link: bool) -> None:
    path = cache / name
    if is_link:
        moved = path.rename(cache.parent / "moved")
        path.symlink_to(moved)
        os.lchown(path, 12345, 12345)
    else:
        os.chown(path, 12345, 12345)
    with pytest.raises(UntrustedFolder, match=f"{path} belongs to user 12345"):
        check(cache)


def test_a_worker_and_the_compiler_beside_it_load_no_kernel_from_such_a_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    tried = subprocess.run(
        [sys.executable, "-c", "import weir.ops.cpu.attention"],
        env={**os.environ, "WEIR_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert tried.returncode != 0
    assert f"UntrustedFolder: {tmp_path}/kernels has mode 0777" in tried.stderr
    assert not list((tmp_path / "kernels").rglob("*.nb*"))


def refuses(call: Callable[[], None]) -> bool:
    try:
        call()
    except UntrustedFolder:
        return True
    return False


class _Named:
    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)


def test_one_that_another_process_makes_in_that_moment_serves_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def make_after_another(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        make(self, mode)
        make(self, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", make_after_another)
    make_trusted_folder(tmp_path / "cache" / "kernels", tmp_path / "cache", ADVICE)


def test_a_file_that_is_gone_when_it_is_looked_at_is_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (cache, cache / "kernels", cache / "kernels" / "avx2-1f"):
        folder.chmod(0o755)
    walk = os.walk
    monkeypatch.setattr(
        os, "walk", lambda top: ((where, names, [*files, "tmp.1"]) for where, names, files in walk(top))
    )
    check(cache)
