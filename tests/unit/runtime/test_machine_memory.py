"""What is left of a machine's memory, and of a container's."""

from pathlib import Path

import pytest

from weir.runtime.machine_memory import available_bytes, free_disk_bytes

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB available."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 16777216 kB\nMemAvailable: {8 * GIB // 1024} kB\nHugePages_Total: 0\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_group(folder: Path, names: tuple[str, str, str], limit: str, usage: int, cache: int) -> None:
    limit_name, usage_name, cache_name = names
    write(folder / limit_name, f"{limit}\n")
    write(folder / usage_name, f"{usage}\n")
    write(folder / "memory.stat", f"anon 5\n{cache_name} {cache}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_without_cgroups_it_is_what_the_kernel_says(root: Path) -> None:
    assert available_bytes(root) == 8 * GIB


def test_a_limit_leaves_what_is_not_used_or_only_cached(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    write_group(root / "sys/fs/cgroup", V2, str(4 * GIB), 3 * GIB, GIB)
    assert available_bytes(root) == 2 * GIB


@pytest.mark.parametrize(("names", "prefix"), [(V2, ""), (V1, "total_")])
def test_files_that_were_read_often_are_cached_too(root: Path, names: tuple[str, str, str], prefix: str) -> None:
    is_v2 = names is V2
    write(root / "proc/self/cgroup", "0::/\n" if is_v2 else "4:memory:/\n")
    group = root / "sys/fs/cgroup" / ("" if is_v2 else "memory")
    write_group(group, names, str(4 * GIB), 3 * GIB, GIB // 2)
    with (group / "memory.stat").open("a") as file:
        file.write(f"{prefix}active_file {GIB}\n")
    assert available_bytes(root) == 2 * GIB + GIB // 2


def test_a_kernel_that_does_not_say_what_is_available_says_what_is_free_and_cached(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 900 kB\nMemFree: 300 kB\nCached: 200 kB\n")
    assert available_bytes(tmp_path) == 500 * 1024


def test_the_tightest_of_nested_groups_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/outer/inner\n")
    write_group(root / "sys/fs/cgroup/outer", V2, str(GIB), GIB // 2, 0)
    write_group(root / "sys/fs/cgroup/outer/inner", V2, "max", GIB // 4, 0)
    assert available_bytes(root) == GIB // 2


def test_groups_of_version_1_count_too(root: Path) -> None:
    write(root / "proc/self/cgroup", "9:cpu:/x\n4:memory:/box\n1:name=systemd:/\n")
    write_group(root / "sys/fs/cgroup/memory/box", V1, str(2 * GIB), GIB, 0)
    assert available_bytes(root) == GIB


def test_in_a_container_whose_group_has_the_hosts_name_the_top_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/docker/0123\n")
    write_group(root / "sys/fs/cgroup/memory", V1, str(GIB), GIB // 4, 0)
    assert available_bytes(root) == GIB * 3 // 4


def test_a_group_without_a_limit_or_above_the_machine_takes_nothing_away(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/box\n0::/\n")
    write_group(root / "sys/fs/cgroup/memory/box", V1, "9223372036854771712", GIB, 0)
    assert available_bytes(root) == 8 * GIB


def test_a_group_over_its_limit_leaves_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    write_group(root / "sys/fs/cgroup", V2, str(GIB), 2 * GIB, 0)
    assert available_bytes(root) == 0


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
    assert free_disk_bytes(Path("/")) > 0
