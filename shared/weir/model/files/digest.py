"""Names the exact weights, so that pages of one model are never taken for another's."""

from collections.abc import Mapping
from pathlib import Path

import xxhash

from weir.core.device import Arithmetic, Device, Precision
from weir.kv.geometry import PAGE_LAYOUT, PAGE_TOKENS, TOKEN_MAJOR_PAGE_LAYOUT
from weir.model.files.config import load_model_config
from weir.model.files.quantization import folder_scheme
from weir.model.files.safetensors import safetensors_files
from weir.model.files.source import ModelKind, ModelSource
from weir.model.precision import choose_arithmetic

_CHUNK_BYTES = 1 << 22
_VERSIONS: Mapping[Arithmetic, int] = {"int8": 2, "fp32": 1, "bf16": 1, "fp8": 1, "bf16-kv8": 1, "fp8-kv8": 1}
"""To be raised when results, or files of packed weights, change their bits."""
_EXACT_VERSION = 1
"""To be raised when `exact_linear` changes its bits: another tile does."""


def model_digest(
    source: ModelSource,
    precision: Precision,
    device: Device = "cpu",
    *,
    exact: bool = False,
    max_context_tokens: int = 0,
) -> str:
    """32 hex digits over every byte of the weights, the configuration, the device's arithmetic and page layout.

    Equal on every machine that has the same files, wherever they lie. XXH3 runs at memory speed, so for the built-in
    model this takes some 20 ms once the file is cached. Pages that a device computed exactly are no others', nor, of
    models whose rotation depends on it (`load_model_config`), those of another `max_context_tokens`.

    Raises ModelError for a precision that it cannot have there, and for `exact` where it is not.
    """
    config = load_model_config(source, max_context_tokens)
    arithmetic = choose_arithmetic(precision, config, device, exact=exact)
    computed_in, page_layout = f"{arithmetic} {_VERSIONS[arithmetic]}", PAGE_LAYOUT
    if device != "cpu":
        computed_in, page_layout = f"{device} {computed_in}", TOKEN_MAJOR_PAGE_LAYOUT
        computed_in += f" exact {_EXACT_VERSION}" if exact else ""
    digest = xxhash.xxh3_128()
    # a dummy has no bytes: its kind and its configuration are all that there is to it
    digest.update(repr((source.kind, config, computed_in, PAGE_TOKENS, page_layout)).encode())
    if source.kind is ModelKind.HF_FOLDER and (scheme := folder_scheme(source.path)) is not None:
        digest.update(repr(scheme).encode())  # the same bytes are other weights by another one
    for path in _weight_files(source):
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _weight_files(source: ModelSource) -> list[Path]:
    if source.kind is ModelKind.GGUF:
        return [source.path]
    if source.kind is ModelKind.DUMMY:
        return []
    return safetensors_files(source.path)
