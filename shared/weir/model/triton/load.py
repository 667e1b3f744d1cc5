"""From a model's files to something that runs steps by the Triton kernels: on a GPU, or in Triton's interpreter."""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weir.core.cache_dir import check_triton_cache
from weir.core.device import FP8_MATRICES, INT8_PAGES, Arithmetic, Device, Precision
from weir.kv.geometry import ArenaGeometry
from weir.kv.memory.cuda import CudaDriverError
from weir.kv.memory.device import DeviceMemory, try_memory_kind
from weir.kv.memory.slabs import SharedSlab, SlabRefused, SlabsAway, fetch_slab
from weir.model.architecture import ModelConfig, tensor_shapes
from weir.model.errors import ModelError
from weir.model.files.config import load_model_config
from weir.model.files.source import ModelKind, ModelSource
from weir.model.files.tensors import open_tensors
from weir.model.precision import choose_arithmetic
from weir.model.torch.key_balance import balance_keys
from weir.model.torch.weights import (
    WeightFormat,
    Weights,
    dummy_tensor_on,
    fill_weights,
    filled_weights,
    weights_bytes,
    weights_over,
)
from weir.model.triton.memory import memory_tensor, page_tensor

# Triton decides while it is imported whether kernels are interpreted: see `_begin`.
if TYPE_CHECKING:
    from weir.model.triton.runner import TritonRunner

_INTERPRET = "TRITON_INTERPRET"
_LAYOUT = 1
"""To be raised when `weights_over` puts anything elsewhere."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Where weights are shared (`weir.kv.memory.slabs`). `digest`: of the model."""

    socket_path: Path
    digest: str


@dataclass(frozen=True)
class DeviceWeights:
    """A model on its device, not yet at any pages."""

    config: ModelConfig
    weights: Weights
    arithmetic: Arithmetic
    device: torch.device
    slab: SharedSlab | None = None
    """What the weights are views of. None: of memory of this process alone."""

    @property
    def num_bytes(self) -> int:
        """What one step has to read, at least."""
        return self.weights.num_bytes

    def runner_over(
        self, memory: DeviceMemory, arena: ArenaGeometry, *, max_rows: int, max_sequences: int, is_exact: bool = False
    ) -> "TritonRunner":
        """A runner over the pages of an arena of that size, for steps of so many tokens; not warmed up yet.

        `is_exact`: with products of its own, whose rows do not depend on the batch.

        Raises ValueError if the memory is too small for them.
        """
        from weir.model.triton.batch import TritonLimits  # noqa: PLC0415
        from weir.model.triton.runner import TritonRunner  # noqa: PLC0415

        longest = min(self.config.max_context_tokens, arena.max_context_tokens)
        dtype = weight_format(self.arithmetic, self.device).dtype
        if self.arithmetic in INT8_PAGES:
            dtype = torch.int8
        pages = page_tensor(memory, self.config, arena.num_pages, self.device, dtype)
        limits = TritonLimits(max_rows, max_sequences, longest)
        return TritonRunner(self.config, self.weights, pages, limits, is_exact=is_exact)


def weight_format(arithmetic: Arithmetic, device: torch.device) -> WeightFormat:
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
    return WeightFormat(torch.float32 if arithmetic == "fp32" else half, arithmetic in FP8_MATRICES)


def start_device(device: Device, num_threads: int) -> None:
    """What takes long while it holds the interpreter's lock: imports what runners need, and begins to use the device.

    Raises ModelError: there is no such device; UntrustedFolder where others could put kernels into Triton's cache.
    `num_threads` as for `load_on_device`.
    """
    if _begin(device, num_threads).type == "cuda":
        check_triton_cache(os.environ)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    import weir.model.triton.runner  # noqa: F401, PLC0415 - and with it Triton, which `_begin` has to come before


def load_on_device(
    source: ModelSource,
    precision: Precision,
    device: Device,
    num_threads: int,
    shared: SharedWeights | None = None,
    *,
    max_context_tokens: int = 0,
) -> DeviceWeights:
    """The weights that another worker has loaded onto the device; else reads them there, tensor by tensor.

    `num_threads`: of the interpreter's matrix products. `shared` None: the weights are this process's own.
    `max_context_tokens` as for `load_model_config`.

    Raises:
        ModelError: the files are not a model that Weir serves, or not on this device or in this precision; there is no
            such device, or too little memory on it.
    """
    config = load_model_config(source, max_context_tokens)
    arithmetic = choose_arithmetic(precision, config, device)
    target = _begin(device, num_threads)
    kept = weight_format(arithmetic, target)
    read = partial(_reader, source, config, target, kept.dtype)
    kind = try_memory_kind(device)
    if shared is not None and kind is not None:
        num_bytes = weights_bytes(config, kept)

        def fill(memory: DeviceMemory) -> None:
            weights = weights_over(memory_tensor(memory, target)[:num_bytes], kept, config)
            fill_weights(weights, config, read())
            if arithmetic in INT8_PAGES:
                balance_keys(weights, config)
            if target.type == "cuda":
                torch.cuda.synchronize(target)  # others read it as soon as this returns

        try:
            slab = fetch_slab(shared.socket_path, f"{shared.digest}/{arithmetic}/{_LAYOUT}", num_bytes, kind, fill)
        except (SlabsAway, SlabRefused, CudaDriverError) as error:
            _log.warning("weights are not shared with other workers of this device: %s", error)
        else:
            weights = weights_over(memory_tensor(slab.memory, target)[:num_bytes], kept, config)
            return DeviceWeights(config, weights, arithmetic, target, slab)
    if target.type == "cuda":
        _check_memory(source, config, target, kept)
    weights = filled_weights(target, kept, config, read())
    if arithmetic in INT8_PAGES:
        balance_keys(weights, config)
    return DeviceWeights(config, weights, arithmetic, target)


def _reader(
    source: ModelSource, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Callable[[str], torch.Tensor]:
    """Tensors by name; in the file's own type where that is possible, so that nothing is widened on its way."""
    if device.type == "cuda" and source.kind is ModelKind.DUMMY:  # random numbers are made quicker there
        shapes = tensor_shapes(config)
        return lambda name: dummy_tensor_on(device, dtype, name, shapes[name])
    tensors = open_tensors(source, config)

    def read(name: str) -> torch.Tensor:
        stored = tensors.try_view(name)
        if stored is None:
            return torch.from_numpy(tensors.read(name))
        tensor = torch.from_numpy(stored)
        return tensor.view(torch.bfloat16) if tensor.dtype is torch.int16 else tensor

    return read


def _begin(device: Device, num_threads: int) -> torch.device:
    """To be called before anything of this process imports Triton."""
    is_asked = os.environ.get(_INTERPRET) == "1"
    if device == "interpreter":
        if "triton" in sys.modules and not is_asked:
            raise ModelError(f"device interpreter: Triton was imported by this process without {_INTERPRET}=1")
        os.environ[_INTERPRET] = "1"
        torch.set_num_threads(num_threads)
        return torch.device("cpu")
    if is_asked:
        raise ModelError(f"device {device}: {_INTERPRET}=1 is set, so kernels would run on the CPU; unset it")
    if not torch.cuda.is_available():
        raise ModelError(f"device cuda: PyTorch {torch.__version__} finds no GPU; use --device cpu")
    return torch.device("cuda", 0)


def _check_memory(source: ModelSource, config: ModelConfig, device: torch.device, kept: WeightFormat) -> None:
    needed_bytes = weights_bytes(config, kept)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if needed_bytes > free_bytes:
        raise ModelError(
            f"model {source.name!r} needs {needed_bytes / 2**30:.1f} GiB for its weights, but only "
            f"{free_bytes / 2**30:.1f} GiB of {torch.cuda.get_device_name(device)} are free; choose a smaller model, "
            "or fewer workers on this GPU"
        )
