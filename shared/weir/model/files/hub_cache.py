"""Models in the Hugging Face Hub's cache, which every program of that machine shares; looked at, never asked for.

    models--ORG--NAME/refs/REVISION               text: a commit
    models--ORG--NAME/snapshots/COMMIT/FILE       link to the blob
    models--ORG--NAME/blobs/DIGEST                SHA-256 of a large file, git's SHA-1 of a small one
    models--ORG--NAME/.no_exist/COMMIT/FILE       empty: the commit is known to have no such file

Source: "Understand caching" of huggingface_hub's manual. HF_HUB_CACHE and HF_HOME say where it is.
"""

import os
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from weir.model.errors import ModelError, ModelNotFound
from weir.model.files.hub_reference import DEFAULT_REVISION, HubReference, is_commit
from weir.model.files.safetensors import INDEX_NAME, safetensors_files

FOLDER_NAMES = ("config.json", "model.safetensors")
"""A repository that lacks one of them, where the weights have no index either, is no folder to be served."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """`path` is the GGUF file, or the folder of a commit."""

    path: Path
    commit: str

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def hub_cache_dir() -> Path:
    """By the hub's own variables."""
    return Path(constants.HF_HUB_CACHE)


def find_cached(reference: HubReference, cache_dir: Path | None = None) -> CachedModel:
    """The model of a reference, if all of its files are there.

    Raises:
        ModelNotFound: says what is missing and which command fetches it, or which files there are to choose from.
    """
    cache = cache_dir or hub_cache_dir()
    commit = _find_commit(cache / reference.folder_name, reference.revision or DEFAULT_REVISION)
    snapshot = cache / reference.folder_name / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        raise _missing(reference, f"is not in the hub's cache ({cache})")
    if reference.filename:
        path = snapshot / reference.filename
        if not path.is_file():
            raise _missing(reference, f"is not in the hub's cache ({snapshot})")
        return CachedModel(path, commit)
    if not _is_gguf_alone(cache / reference.folder_name, commit):
        return CachedModel(_whole_folder(reference, snapshot), commit)
    return CachedModel(_only_gguf(reference, snapshot), commit)


def _whole_folder(reference: HubReference, snapshot: Path) -> Path:
    try:
        safetensors_files(snapshot)
    except ModelError as error:
        ggufs = _ggufs(snapshot)
        advice = f"; a file that is: {reference.repository}:{ggufs[0]}" if ggufs else ""
        raise _missing(reference, f"is not whole in the hub's cache ({error}{advice})") from error
    for name in ("config.json", "tokenizer.json"):
        if not (snapshot / name).is_file():
            raise _missing(reference, f"is not whole in the hub's cache ({snapshot}: no {name})")
    return snapshot


def _only_gguf(reference: HubReference, snapshot: Path) -> Path:
    ggufs = _ggufs(snapshot)
    if len(ggufs) > 1:
        names = ", ".join(f"{reference.repository}:{name}" for name in ggufs)
        raise ModelNotFound(f"model {str(reference)!r} has several files in the hub's cache; name one: {names}")
    if not ggufs:
        raise _missing(reference, f"is not whole in the hub's cache ({snapshot})")
    return snapshot / ggufs[0]


def _ggufs(snapshot: Path) -> list[str]:
    return sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf"))


def _is_gguf_alone(repository_folder: Path, commit: str) -> bool:
    """Whether the whole repository means its GGUF file. What is here does not say: one of its files may be.

    A folder of several files of weights lacks `model.safetensors`, and transformers writes that down, too.
    """
    snapshot = repository_folder / "snapshots" / commit
    if all((snapshot / name).is_file() for name in ("config.json", INDEX_NAME)):
        return False
    return any((repository_folder / ".no_exist" / commit / name).is_file() for name in FOLDER_NAMES)


def write_absent(repository_folder: Path, commit: str, names: Iterable[str]) -> None:
    """That a commit has no files of these names, as huggingface_hub keeps it."""
    folder = repository_folder / ".no_exist" / commit
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def link_blob(blob: Path, path: Path) -> Path:
    """`path` in a snapshot, a relative link to the blob: in one step, whatever was there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{uuid.uuid4().hex}.link")
    fresh.symlink_to(os.path.relpath(blob, path.parent))
    fresh.replace(path)
    return path


def _missing(reference: HubReference, what: str) -> ModelNotFound:
    offline = " once HF_HUB_OFFLINE is not set" if constants.is_offline_mode() else ""
    return ModelNotFound(f"model {str(reference)!r} {what}; run `weir pull {reference}`{offline}")


def _find_commit(repository_folder: Path, revision: str) -> str:
    """Empty: a branch or tag that nobody has asked for here."""
    if is_commit(revision):
        return revision
    try:
        commit = (repository_folder / "refs" / revision).read_text().strip()
    except OSError:
        return ""
    return commit if is_commit(commit) else ""


def write_ref(repository_folder: Path, revision: str, commit: str) -> None:
    """In one step: who reads meanwhile finds the old commit or the new one."""
    if is_commit(revision):
        return
    path = repository_folder / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=repository_folder, prefix=".ref-", delete=False) as fresh:
        fresh.write(commit)
    os.chmod(fresh.name, 0o644)  # noqa: PTH101 - a Path of the name says no more; others' programs read it too
    Path(fresh.name).replace(path)
