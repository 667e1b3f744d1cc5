"""A predictor as one file: numpy's .npz with a JSON header, and no pickle in it.

header            JSON: format, version, kind, model, tokenizer_digest, num_training, held_out_tau
table.NAME        arrays of the token table
head.NAME         arrays of the ranking network or the forest
"""

import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.predictor import Arrays, Forest, Head, Predictor, PredictorInfo, Ranker
from weir.policy.predictors.token_table import table_from_arrays

FORMAT = "weir-predictor"
VERSION = 2
_MAX_BYTES = 1 << 28


class PredictorFileError(Exception):
    """A file is not a predictor of this version, or is damaged; the message names the file and the reason."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}; make one with `weir train-predictor`")


def save_predictor(path: Path, predictor: Predictor) -> None:
    """Written under another name first: nobody sees half of it. Raises OSError."""
    info, table = predictor.info, predictor.features.table
    header = {
        "format": FORMAT,
        "version": VERSION,
        "kind": predictor.head.kind,
        "model": info.model,
        "tokenizer_digest": table.tokenizer_digest,
        "num_training": info.num_training,
        "held_out_tau": info.held_out_tau,
    }
    arrays: dict[str, npt.NDArray[Any]] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    arrays |= {f"table.{name}": array for name, array in table.arrays().items()}
    arrays |= {f"head.{name}": array for name, array in predictor.head.arrays().items()}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_predictor(path: Path, tokenizer_digest: str | None = None) -> Predictor:
    """`tokenizer_digest`: of the tokenizer whose ids it will see (`digest_of_tokens`); None: not checked.

    Raises:
        PredictorFileError: no such file, not a whole predictor of this version, or made for another tokenizer.
    """
    try:
        content = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else None
    except OSError as error:
        raise PredictorFileError(path, f"cannot be read ({error.strerror or error})") from error
    if content is None:
        raise PredictorFileError(path, f"has more than the {_MAX_BYTES} bytes that are read at most")
    arrays = _arrays_of(path, content)
    header = _header(path, arrays)
    if tokenizer_digest not in (None, header["tokenizer_digest"]):
        raise PredictorFileError(path, f"was made for another tokenizer than that of this model ({header['model']!r})")
    try:
        table = table_from_arrays(header["tokenizer_digest"], _part(arrays, "table"))
        head = _HEADS[header["kind"]](_part(arrays, "head"))
        info = PredictorInfo(header["model"], int(header["num_training"]), float(header["held_out_tau"]))
        return Predictor(PromptFeatures(table), head, info)
    except KeyError as error:
        raise PredictorFileError(path, f"lacks {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise PredictorFileError(path, f"is damaged: {error}") from error


def _arrays_of(path: Path, content: bytes) -> Arrays:
    try:
        with zipfile.ZipFile(io.BytesIO(content)):  # numpy leaves what is no archive open
            pass
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise PredictorFileError(path, f"is not a predictor, or is damaged ({error})") from error


def _header(path: Path, arrays: Arrays) -> dict[str, Any]:
    try:
        header = json.loads(arrays["header"].astype(np.uint8).tobytes())
        found = (header["format"], header["version"])
    except (KeyError, ValueError, TypeError) as error:
        raise PredictorFileError(path, "has no header of a predictor") from error
    if found != (FORMAT, VERSION):
        raise PredictorFileError(path, f"is {found[0]!r} version {found[1]!r}; this is {FORMAT!r} version {VERSION}")
    if header.get("kind") not in _HEADS:
        raise PredictorFileError(path, f"is of kind {header.get('kind')!r}; known are {', '.join(_HEADS)}")
    return dict(header)


def _part(arrays: Arrays, part: str) -> dict[str, npt.NDArray[Any]]:
    return {name.removeprefix(f"{part}."): array for name, array in arrays.items() if name.startswith(f"{part}.")}


_HEADS: Mapping[str, Callable[[Arrays], Head]] = {kind.kind: kind.from_arrays for kind in (Ranker, Forest)}
