"""Packed weights are made once a machine, and never used unless every byte is as it was written."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.model.tiny import TinyLlama

from weir.core.file_lock import StillLocked, file_lock
from weir.model.cpu.packed_weights import DATA_START, PackedWeights, load_packed
from weir.model.errors import ModelError
from weir.model.files.config import load_model_config

PROGRAM = """
import logging, sys
from pathlib import Path
from weir.model.files.config import load_model_config
from weir.model.cpu.packed_weights import load_packed
from weir.model.files.source import resolve_model
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
source = resolve_model(sys.argv[1])
load_packed(source, load_model_config(source), "d", Path(sys.argv[2]))
print("torch" in sys.modules, "numba" in sys.modules)
"""


def load(tiny: TinyLlama, cache_dir: Path) -> PackedWeights:
    return load_packed(tiny.source, load_model_config(tiny.source), "d", cache_dir)


def files_in(cache_dir: Path) -> list[Path]:
    return [path for path in (cache_dir / "packed").iterdir() if path.suffix != ".lock"]


def test_processes_that_start_at_once_make_the_file_once_and_without_torch(tiny: TinyLlama, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny.folder), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert sum("packed " in output for output in outputs) == 1, outputs
    assert all(output.endswith("False False\n") for output in outputs)
    assert len(files_in(tmp_path)) == 1, "nothing temporary is left"


def test_a_process_that_packs_for_ever_is_not_waited_for_for_ever(
    tiny: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.model.cpu.packed_weights._PACKING_TIMEOUT_S", 0.2)
    load(tiny, tmp_path)
    (path,) = files_in(tmp_path)
    path.unlink()
    with (
        file_lock(path.with_suffix(".lock"), "packing", timeout_s=0),
        pytest.raises(StillLocked, match=f"packing {tiny.source.name}: another process has held"),
    ):
        load(tiny, tmp_path)
    load(tiny, tmp_path)
    assert files_in(tmp_path) == [path]


def test_what_killed_processes_have_left_is_gone_with_the_next_file(tiny: TinyLlama, tmp_path: Path) -> None:
    program = PROGRAM.replace("load_packed(source,", "os.fsync = lambda _: os._exit(9)\nload_packed(source,")
    command = [sys.executable, "-c", f"import os\n{program}", str(tiny.folder), str(tmp_path)]
    for _ in range(2):
        assert subprocess.run(command, check=False, timeout=300).returncode == 9
    assert len(files_in(tmp_path)) == 1
    load(tiny, tmp_path)
    (path,) = files_in(tmp_path)
    assert path.suffix == ".weights"


def test_a_second_load_maps_the_same_bytes_read_only(tiny: TinyLlama, tmp_path: Path) -> None:
    first = load(tiny, tmp_path)
    (path,) = files_in(tmp_path)
    written_ns = path.stat().st_mtime_ns
    second = load(tiny, tmp_path)
    assert path.stat().st_mtime_ns == written_ns
    assert np.array_equal(first.mapped, second.mapped)
    with pytest.raises(ValueError, match="read-only"):
        second.mapped[0] = 1
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert sum(line.endswith(path.name) and " r--s " in line for line in maps) == 2, "mapped, shared, not copied"


def cut_off(data: bytearray) -> None:
    del data[-64:]


def empty(data: bytearray) -> None:
    data.clear()


def flip_in_data(data: bytearray) -> None:
    data[DATA_START + 1000] ^= 1


def flip_in_index(data: bytearray) -> None:
    data[100] ^= 1


def other_version(data: bytearray) -> None:
    data[6] ^= 0xFF


def hole_at_the_end(data: bytearray) -> None:
    data[-4096:] = bytes(4096)


@pytest.mark.parametrize("damage", [cut_off, empty, flip_in_data, flip_in_index, other_version, hole_at_the_end])
def test_a_damaged_file_is_made_again(
    damage: Callable[[bytearray], None], tiny: TinyLlama, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(tiny, tmp_path)
    (path,) = files_in(tmp_path)
    whole = path.read_bytes()
    data = bytearray(whole)
    damage(data)
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        found = load(tiny, tmp_path)
    assert found.mapped.tobytes() == whole
    assert path.read_bytes() == whole
    assert "it is made again" in caplog.text


def test_an_old_file_stays_usable_for_those_who_have_mapped_it(tiny: TinyLlama, tmp_path: Path) -> None:
    first = load(tiny, tmp_path)
    (path,) = files_in(tmp_path)
    whole = path.read_bytes()
    path.unlink()
    load(tiny, tmp_path)
    assert first.mapped.tobytes() == whole


def test_a_cache_that_cannot_be_written_is_named_with_what_to_do(tiny: TinyLlama, tmp_path: Path) -> None:
    (tmp_path / "packed").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="WEIR_CACHE"):
        load(tiny, tmp_path)
