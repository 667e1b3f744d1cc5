"""The segment's file: nobody else's is used, and nobody's is removed while it is used."""

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from weir.core.process import own_identity
from weir.kv.arena.lease import LeaseTable
from weir.kv.arena.segment import Segment, SegmentError, claim_segment
from weir.kv.arena.segment_file import populate
from weir.kv.geometry import ArenaGeometry


def _write_other_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\xff\xff\xff\xff")


@pytest.mark.parametrize("damage", [None, _write_other_version], ids=["other geometry", "other version"])
def test_a_segment_that_workers_map_is_not_replaced(
    segment: Segment, geometry: ArenaGeometry, damage: Callable[[Path], None] | None
) -> None:
    worker = Segment.open(segment.path)
    segment.close()
    if damage is not None:
        damage(segment.path)
    larger = replace(geometry, num_pages=41)
    with pytest.raises(SegmentError, match=r"cannot be replaced \(it.*\): a process still maps it; end what does"):
        claim_segment(segment.path, larger, "digest")
    assert segment.path.exists()
    pages = worker.pages
    worker.close()
    with pytest.raises(SegmentError, match="still maps it"):  # views keep the mapping
        claim_segment(segment.path, larger, "digest")
    del pages
    claimed = claim_segment(segment.path, larger, "digest")
    assert claimed.is_new
    claimed.segment.close()


def test_whoever_has_a_lease_and_lives_is_named_when_a_segment_cannot_be_replaced(
    segment: Segment, geometry: ArenaGeometry
) -> None:
    own = own_identity()
    table = LeaseTable(segment.lease_rows, segment.counters)
    table.try_add("decode-0", "decode", own)
    table.try_add("decode-1", "decode", replace(own, start_ticks=own.start_ticks - 1))
    worker = Segment.open(segment.path)
    segment.close()
    named = rf"\): worker decode-0 \(process {os.getpid()}\) still maps it"
    with pytest.raises(SegmentError, match=named):
        claim_segment(segment.path, geometry, "another digest")
    worker.close()


def test_the_workers_of_a_segment_that_fits_do_not_keep_it_from_being_taken_over(
    segment: Segment, geometry: ArenaGeometry
) -> None:
    worker = Segment.open(segment.path)
    segment.close()
    claimed = claim_segment(segment.path, geometry, "digest")
    assert not claimed.is_new
    claimed.segment.close()
    worker.close()


def test_a_mapping_of_a_process_that_was_killed_keeps_nothing(segment: Segment, geometry: ArenaGeometry) -> None:
    segment.close()
    script = "import sys, time; from pathlib import Path; from weir.kv.arena.segment import Segment; "
    script += "mapped = Segment.open(Path(sys.argv[1])); print('mapped', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, str(segment.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"mapped\n"
            with pytest.raises(SegmentError, match="still maps it"):
                claim_segment(segment.path, geometry, "another digest")
        finally:
            process.kill()
    claimed = claim_segment(segment.path, geometry, "another digest")
    assert claimed.is_new
    claimed.segment.close()


@pytest.mark.parametrize("use", [Segment.open, Segment.take])
def test_a_file_that_another_user_can_have_put_there_is_refused_by_name(
    segment: Segment, use: Callable[[Path], Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    segment.close()
    path = segment.path
    link, folder = path.with_name("link"), path.with_name("folder")
    link.symlink_to(path)
    folder.mkdir()
    pipe = path.with_name("pipe")
    os.mkfifo(pipe, 0o600)
    for other, problem in (
        (link, "it is a symbolic link"),
        (folder, "it is not a regular file"),
        (pipe, "it is not a regular file"),
    ):
        with pytest.raises(SegmentError, match=f"{other} is not used as a segment: {problem}; remove it, or choose"):
            use(other)
    for mode in (0o666, 0o640, 0o604, 0o400):
        path.chmod(mode)
        with pytest.raises(SegmentError, match=rf"arena is not used as a segment: its mode is {mode:04o}, a segment's"):
            use(path)
    path.chmod(0o600)
    use(path).close()
    monkeypatch.setattr("os.getuid", lambda: 4321)
    with pytest.raises(SegmentError, match=r"it belongs to user \d+, this process runs as user 4321"):
        use(path)
    with pytest.raises(FileNotFoundError):
        use(path.with_name("nothing"))


def num_descriptors_of(file: Path) -> int:
    """That this process has. Other files are opened and closed at any time by threads of tests before this one."""
    num_found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            num_found += descriptor.samefile(file)
    return num_found


@pytest.mark.parametrize("use", [Segment.open, Segment.take])
def test_a_mapping_keeps_two_descriptors_and_none_after_it_is_closed(
    segment: Segment, use: Callable[[Path], Segment]
) -> None:
    segment.close()
    used = use(segment.path)
    # Of the mapping and the annexes; of the lock.
    assert num_descriptors_of(segment.path) == (2 if use == Segment.open else 3)
    used.close()
    assert num_descriptors_of(segment.path) == 0


def test_children_that_are_forked_do_not_have_the_pages(segment: Segment) -> None:
    worker = Segment.open(segment.path)
    flags: list[str] = []
    is_segment = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_segment = line.endswith(str(segment.path))
        elif is_segment and line.startswith("VmFlags:"):
            flags.append(line)
    worker.close()
    assert len(flags) >= 1
    assert all(" dc" in line for line in flags)


class OldKernel(mmap.mmap):
    """A mapping on a kernel that cannot populate."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "unknown advice")


@pytest.mark.parametrize("num_pages", [1, 3, 4, 5])
def test_an_old_kernel_is_made_to_map_every_part_by_reading_it(tmp_path: Path, num_pages: int) -> None:
    (tmp_path / "file").write_bytes(bytes(num_pages * mmap.PAGESIZE))
    with (tmp_path / "file").open("r+b") as file, OldKernel(file.fileno(), 0) as mapping:
        populate(mapping, [(0, len(mapping))], step_bytes=2 * mmap.PAGESIZE)
