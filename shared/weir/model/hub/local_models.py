"""The models of this machine: the built-in one, and what the hub's cache holds, fetched by whatever program."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.utils import CachedRepoInfo, CachedRevisionInfo

from weir.model.errors import ModelError
from weir.model.files.catalog import CATALOG, model_cache_dir
from weir.model.files.hub_cache import CachedModel, find_cached, hub_cache_dir
from weir.model.files.hub_reference import DEFAULT_REVISION, HubReference, parse_hub_reference
from weir.model.files.source import ModelKind, ModelSource
from weir.model.hub.blobs import PARTIAL_SUFFIX
from weir.model.hub.servable import find_obstacle


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`name` is what `--model` takes. `digest`: SHA-256 of a GGUF file; a folder is known by its `revision`.
    `obstacle`: why it is not served; empty: it is. `partial_bytes`: of files that are on their way."""

    name: str
    size_bytes: int
    revision: str
    digest: str
    path: str
    obstacle: str
    partial_bytes: int = 0


def list_local_models(cache_dir: Path | None = None) -> list[LocalModel]:
    """By name, the built-in ones first. Reads headers. A repository that is not as a cache has it is left out."""
    return [*_built_in(), *sorted(_on_hub(cache_dir or hub_cache_dir()), key=lambda model: model.name)]


def _built_in() -> Iterator[LocalModel]:
    for name, entry in CATALOG.items():
        path = entry.path_in(model_cache_dir())
        obstacle = f"not here yet: `weir pull {name}`"
        if path.is_file():
            obstacle = find_obstacle(ModelSource(name, path, ModelKind.GGUF))
        yield LocalModel(name, entry.file_bytes, entry.version, entry.file_sha256, str(path), obstacle)


def _on_hub(cache_dir: Path) -> Iterator[LocalModel]:
    try:
        repositories = scan_cache_dir(cache_dir).repos
    except CacheNotFound:
        return
    for repository in repositories:
        if repository.repo_type == "model" and repository.repo_id.count("/") == 1:
            yield from _of_repository(repository, cache_dir)
    for folder in cache_dir.glob("models--*--*"):
        if not (folder / "snapshots").is_dir():
            yield from _only_begun(folder)


def _only_begun(folder: Path) -> Iterator[LocalModel]:
    """A repository none of whose files is whole yet."""
    partial_bytes = _partial_bytes(folder)
    if partial_bytes:
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        obstacle = f"only partly here: `weir pull {name}`, or the file that was named then"
        yield LocalModel(name, 0, "", "", str(folder), obstacle, partial_bytes)


def _of_repository(repository: CachedRepoInfo, cache_dir: Path) -> Iterator[LocalModel]:
    partial_bytes = _partial_bytes(repository.repo_path)
    for revision in repository.revisions:
        try:
            reference = parse_hub_reference(repository.repo_id).at(_shown_revision(revision))
        except ModelError:
            continue  # nothing that --model could name
        for one in _references(reference, revision):
            yield _look_at(one, revision, cache_dir, partial_bytes)


def _partial_bytes(folder: Path) -> int:
    return sum(_size_bytes(path) for path in (folder / "blobs").glob(f"*{PARTIAL_SUFFIX}"))


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a pull has just given it its own name
        return 0


def _shown_revision(revision: CachedRevisionInfo) -> str:
    """Empty for what is meant without one; else a branch or tag that stands for it here, or the commit."""
    if DEFAULT_REVISION in revision.refs:
        return ""
    return min(revision.refs, default=revision.commit_hash)


def _references(reference: HubReference, revision: CachedRevisionInfo) -> list[HubReference]:
    """One a GGUF file, and one for the folder."""
    names = [str(file.file_path.relative_to(revision.snapshot_path)) for file in revision.files]
    ggufs = [HubReference(reference.repository, name, reference.revision) for name in names if name.endswith(".gguf")]
    return [reference, *ggufs] if "config.json" in names or not ggufs else ggufs


def _look_at(reference: HubReference, revision: CachedRevisionInfo, cache_dir: Path, partial_bytes: int) -> LocalModel:
    path, digest, obstacle = revision.snapshot_path, "", ""
    size_bytes = revision.size_on_disk
    try:
        cached = find_cached(reference, cache_dir)
        path = cached.path
        obstacle = find_obstacle(_source_of(reference, cached))
        if cached.is_gguf:
            digest, size_bytes = path.resolve().name if path.is_symlink() else "", path.stat().st_size
    except ModelError as error:
        obstacle = str(error)
    return LocalModel(str(reference), size_bytes, revision.commit_hash, digest, str(path), obstacle, partial_bytes)


def _source_of(reference: HubReference, cached: CachedModel) -> ModelSource:
    return ModelSource(reference.name, cached.path, ModelKind.GGUF if cached.is_gguf else ModelKind.HF_FOLDER)
