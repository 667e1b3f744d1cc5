"""Whether a model's files are ones that Weir serves, by headers and tokenizer; no weight is read."""

from pathlib import Path

from weir.model.errors import ModelError, PullError
from weir.model.files.config import load_model_config
from weir.model.files.config_gguf import check_gguf_header
from weir.model.files.gguf import read_gguf
from weir.model.files.source import ModelSource
from weir.model.files.tensors import open_tensors
from weir.model.tokens.tokenizer import load_tokenizer


def find_obstacle(source: ModelSource) -> str:
    """Why Weir does not serve the files; empty: it does. The tokenizer is not looked at, which takes a second."""
    try:
        open_tensors(source, load_model_config(source))
    except (ModelError, OSError) as error:
        return _without_path(error, source.path)
    return ""


def check_servable(source: ModelSource) -> None:
    """Headers and tokenizer. Raises PullError."""
    obstacle = find_obstacle(source)
    if obstacle:
        raise PullError(f"{source.name}: {obstacle}")
    try:
        load_tokenizer(source)
    except ModelError as error:
        raise PullError(f"{source.name}: {_without_path(error, source.path)}") from error


def check_config(source: ModelSource) -> None:
    """The architecture, before there are weights. Raises PullError."""
    try:
        load_model_config(source)
    except ModelError as error:
        raise PullError(f"{source.name}: {_without_path(error, source.path)}") from error


def check_gguf_head(path: Path, name: str) -> None:
    """The architecture and the types of the tensors, of a GGUF file that is not whole.

    A header that is longer than what has come cannot be read yet, and passes. Raises PullError.
    """
    # here and not above: it loads the library of GGUF files, which folders do without
    from weir.model.files.gguf_tensors import check_tensor_types  # noqa: PLC0415

    try:
        header = read_gguf(path, with_texts=False)
    except ModelError:
        return
    try:
        check_gguf_header(header)
        check_tensor_types(header)
    except ModelError as error:
        raise PullError(f"{name}: {_without_path(error, path)}") from error


def _without_path(error: Exception, path: Path) -> str:
    """The message without where in the cache the file lies, which says nothing to who named a repository."""
    return str(error).replace(f"{path}/", "").removeprefix(f"{path}: ")
