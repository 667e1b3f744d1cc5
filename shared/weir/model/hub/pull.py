"""A model from the hub into its cache: what it takes is known, and refused, before its weights are asked for."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from weir.core.file_lock import StillLocked, file_lock
from weir.model.errors import PullError
from weir.model.files.catalog import PullProgress
from weir.model.files.hub_cache import FOLDER_NAMES, find_cached, write_absent, write_ref
from weir.model.files.hub_reference import DEFAULT_REVISION, HubReference
from weir.model.files.source import ModelKind, ModelSource
from weir.model.hub.blobs import FetchWatch, RemoteFile
from weir.model.hub.repository import (
    HEAD_NAMES,
    MAX_TEXT_BYTES,
    TEXT_NAMES,
    Hub,
    Repository,
    choose_gguf,
    open_repository,
    pull_errors,
    weights_of,
)
from weir.model.hub.servable import check_config, check_gguf_head, check_servable

_LOCK_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class PullPlan:
    """What a pull will do. `missing_bytes` of `total_bytes` have yet to come."""

    reference: HubReference
    commit: str
    num_files: int
    total_bytes: int
    missing_bytes: int
    cache_dir: Path


@dataclass(frozen=True, slots=True)
class PullWatch:
    """Who is told of a pull: first its plan, then its progress over all files."""

    plan: Callable[[PullPlan], None]
    progress: Callable[[PullProgress], None]


def pull_from_hub(reference: HubReference, hub: Hub, watch: PullWatch) -> Path:
    """The GGUF file, or the folder, with every digest checked. With HF_HUB_OFFLINE: what is there, unchecked.

    The branch or tag stands for the new commit only when all of it is here: until then the old one is served.

    Raises:
        ModelNotFound: offline, and not there.
        PullError: says what was asked for and what to do; what has come is kept for the next call.
    """
    if constants.is_offline_mode():
        return find_cached(reference, hub.cache_dir).path
    locks = hub.cache_dir / ".locks" / reference.folder_name
    try:
        with pull_errors(reference, hub):
            locks.mkdir(parents=True, exist_ok=True)
        with file_lock(locks / "weir.lock", f"pulling {reference.name}", timeout_s=_LOCK_TIMEOUT_S):
            return _pull_alone(open_repository(reference, hub), watch)
    except StillLocked as error:
        raise PullError(error.message) from error


def _pull_alone(repository: Repository, watch: PullWatch) -> Path:
    gguf = choose_gguf(repository)
    files = [gguf] if gguf is not None else _files_of_folder(repository)
    total_bytes = sum(file.size_bytes for file in files)
    plan = PullPlan(
        repository.reference,
        repository.commit,
        len(files),
        total_bytes,
        repository.missing_bytes(files),
        repository.hub.cache_dir,
    )
    watch.plan(plan)
    _need_room(plan)
    done_bytes = 0
    for file in files:
        repository.fetch(file, _watch_of(repository, file, done_bytes, total_bytes, watch))
        done_bytes += file.size_bytes
    # all at once: a folder without an index is taken for whole by the files that it has
    repository.link(files)
    path = repository.snapshot / gguf.name if gguf is not None else repository.snapshot
    check_servable(ModelSource(repository.reference.name, path, ModelKind.GGUF if gguf else ModelKind.HF_FOLDER))
    with pull_errors(repository.reference, repository.hub):
        if gguf is not None and not repository.reference.filename:
            absent = [name for name in FOLDER_NAMES if name not in repository.files]
            write_absent(repository.folder, repository.commit, absent)
        write_ref(repository.folder, repository.reference.revision or DEFAULT_REVISION, repository.commit)
    return path


def _files_of_folder(repository: Repository) -> list[RemoteFile]:
    """Fetches what says whether Weir serves it; all else comes afterwards, the weights last."""
    heads = [repository.files[name] for name in HEAD_NAMES if name in repository.files]
    texts = [repository.files[name] for name in TEXT_NAMES if name in repository.files]
    for file in (*heads, *texts):
        _need_text_size(repository, file)
    for file in heads:
        repository.fetch(file, FetchWatch(lambda _: None))
    repository.link(heads)
    check_config(ModelSource(repository.reference.name, repository.snapshot, ModelKind.HF_FOLDER))
    if TEXT_NAMES[0] not in repository.files:
        raise PullError(f"{repository.reference}: has no {TEXT_NAMES[0]}, from which Weir reads a folder's tokenizer")
    return [*heads, *texts, *weights_of(repository)]


def _need_text_size(repository: Repository, file: RemoteFile) -> None:
    if file.size_bytes > MAX_TEXT_BYTES:
        raise PullError(
            f"{repository.reference}: {file.name} has {file.size_bytes / 1e6:.0f} MB, and may have "
            f"{MAX_TEXT_BYTES / 1e6:.0f} MB; that is no such file of a model: look at the repository"
        )


def _watch_of(
    repository: Repository, file: RemoteFile, before_bytes: int, total_bytes: int, watch: PullWatch
) -> FetchWatch:
    def progress(done_bytes: int) -> None:
        watch.progress(PullProgress("download", before_bytes + done_bytes, total_bytes))

    def check_head(path: Path) -> None:
        check_gguf_head(path, f"{repository.reference}")

    return FetchWatch(progress, check_head if file.name.endswith(".gguf") else None)


def _need_room(plan: PullPlan) -> None:
    folder = plan.cache_dir
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if plan.missing_bytes > free_bytes:
        raise PullError(
            f"{plan.reference}: {plan.missing_bytes / 1e9:.2f} GB have yet to come, and {plan.cache_dir} has "
            f"{free_bytes / 1e9:.2f} GB free; make room there, or set HF_HOME to a folder on another disk"
        )
