"""From what a user calls a model to the files on disk."""

import enum
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weir.model.errors import ModelNotFound
from weir.model.files.catalog import CATALOG, model_cache_dir
from weir.model.files.hub_reference import HubReference, may_be_hub_reference, parse_hub_reference

_MAX_STEM_CHARS = 120


class ModelKind(enum.Enum):
    """How the model's files are laid out."""

    GGUF = "gguf"
    HF_FOLDER = "hf_folder"
    DUMMY = "dummy"


DUMMY_PREFIX = "dummy:"
"""Before the name of a shape: no files, random weights."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`path` is the GGUF file, or the folder with config.json, *.safetensors and tokenizer.json.

    A dummy has no files: its `path` is its name, for messages.
    """

    name: str
    path: Path
    kind: ModelKind

    @property
    def file_stem(self) -> str:
        """For names of files that are made of the model; a name of the hub has a slash."""
        return self.name.replace("/", "--")[:_MAX_STEM_CHARS]

    def state(self) -> tuple[int, ...]:
        """Of the files that configuration and tokenizer are read from: another one as soon as one of them is another.
        Who keeps what was read from them keeps it by this. A file that is not there is none of them."""
        match self.kind:
            case ModelKind.GGUF:
                paths = [self.path]
            case ModelKind.HF_FOLDER:
                paths = sorted(self.path.glob("*.json"))
            case ModelKind.DUMMY:
                paths = []
        state: list[int] = []
        for path in paths:
            with suppress(OSError):  # which whoever reads it meets, too, and names
                found = path.stat()
                state += (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        return tuple(state)


def resolve_model(name_or_path: str, cache_dir: Path | None = None) -> ModelSource:
    """A name of the catalog or of the hub that has been pulled, a GGUF file, a Hugging Face folder, or `dummy:` and a
    known shape. Nothing is fetched.

    A catalog name wins over a file or folder of the same name; write `./name` for the latter. A file or folder wins
    over a name of the hub.

    Raises:
        ModelNotFound: says what was looked for, and which command fetches it.
    """
    if name_or_path.startswith(DUMMY_PREFIX):
        from weir.model.files.dummy import shape_named  # noqa: PLC0415 - loads numpy

        shape_named(name_or_path.removeprefix(DUMMY_PREFIX))
        return ModelSource(name_or_path, Path(name_or_path), ModelKind.DUMMY)
    entry = CATALOG.get(name_or_path)
    if entry is not None:
        path = entry.path_in(cache_dir or model_cache_dir())
        if not path.is_file():
            raise ModelNotFound(
                f"model {entry.name!r} is not in the model cache ({path}); run `weir pull {entry.name}`"
            )
        return ModelSource(entry.name, path, ModelKind.GGUF)
    local = _try_path(name_or_path)
    if local is not None:
        return _resolve_path(local)
    reference = try_hub_reference(name_or_path)
    if reference is not None:
        return _resolve_on_hub(reference)
    known = ", ".join(f"`weir pull {name}`" for name in CATALOG)
    raise ModelNotFound(
        f"no model {name_or_path!r}: neither a known name ({known}), nor ORG/NAME of the hub, nor a GGUF file, "
        "nor a folder"
    )


def try_hub_reference(name_or_path: str) -> HubReference | None:
    """None: it means the catalog, or a path. Raises ModelNotFound for what means the hub and is malformed."""
    is_local = name_or_path.startswith(DUMMY_PREFIX) or name_or_path in CATALOG
    is_local = is_local or _try_path(name_or_path) is not None
    if is_local or not may_be_hub_reference(name_or_path):
        return None
    return parse_hub_reference(name_or_path)


def pinned(name_or_path: str) -> str:
    """What keeps its meaning while somebody pulls: a branch of the hub becomes the commit that is in the cache.

    Raises ModelNotFound.
    """
    reference = try_hub_reference(name_or_path)
    if reference is None:
        return name_or_path
    from weir.model.files.hub_cache import find_cached  # noqa: PLC0415

    return str(reference.at(find_cached(reference).commit))


def _resolve_on_hub(reference: HubReference) -> ModelSource:
    from weir.model.files.hub_cache import find_cached  # noqa: PLC0415 - most models need none of the hub's library

    cached = find_cached(reference)
    return ModelSource(reference.name, cached.path, ModelKind.GGUF if cached.is_gguf else ModelKind.HF_FOLDER)


def _resolve_path(path: Path) -> ModelSource:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} is a folder without config.json; name a Hugging Face model folder")
        return ModelSource(path.resolve().name, path, ModelKind.HF_FOLDER)
    if path.suffix != ".gguf":
        raise ModelNotFound(f"{path} is not a .gguf file; name a GGUF file or a Hugging Face model folder")
    return ModelSource(path.stem, path, ModelKind.GGUF)


def _try_path(name_or_path: str) -> Path | None:
    """The file or folder of this name; None: there is none, or no path is like this."""
    try:
        path = Path(name_or_path).expanduser()
        return path if path.is_dir() or path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # too long; ~ of nobody; a NUL
        return None
