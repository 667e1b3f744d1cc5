"""From what a user calls a model to the files on disk."""

import enum
from dataclasses import dataclass
from pathlib import Path

from weir.model.errors import ModelNotFound
from weir.model.files.catalog import CATALOG, model_cache_dir


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


def resolve_model(name_or_path: str, cache_dir: Path | None = None) -> ModelSource:
    """A name of the catalog that has been pulled, a GGUF file, a Hugging Face folder, or `dummy:` and a known shape.

    A catalog name wins over a file or folder of the same name; write `./name` for the latter.

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
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} is a folder without config.json; name a Hugging Face model folder")
        return ModelSource(path.resolve().name, path, ModelKind.HF_FOLDER)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is not a .gguf file; name a GGUF file or a Hugging Face model folder")
        return ModelSource(path.stem, path, ModelKind.GGUF)
    known = ", ".join(f"`weir pull {name}`" for name in CATALOG)
    raise ModelNotFound(f"no model {name_or_path!r}: neither a known name ({known}), nor a GGUF file, nor a folder")
