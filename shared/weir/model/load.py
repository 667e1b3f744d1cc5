"""From a model's files to something that runs steps."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from weir.core.device import Arithmetic, Precision
from weir.engine.plan import ModelRunner
from weir.kv.geometry import PageGeometry
from weir.model.architecture import ModelConfig
from weir.model.cpu.core_share import CoreShare
from weir.model.files.catalog import model_cache_dir
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.source import ModelSource
from weir.model.precision import choose_arithmetic, page_geometry

# Each arithmetic imports its own libraries, and only when it is used: torch alone is 200 MB and seconds.
if TYPE_CHECKING:
    from weir.model.cpu.packed_weights import PackedWeights
    from weir.model.torch.weights import Weights

Pages = npt.NDArray[np.uint8]


class Runner(ModelRunner, Protocol):
    """A runner that is not yet fast."""

    def warm_up(self) -> None:
        """Compiles and touches everything that steps need; no page of the arena is written, or matters."""
        ...


class LoadedWeights(Protocol):
    """A model in memory, not yet at any pages."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def arithmetic(self) -> Arithmetic: ...

    @property
    def page_geometry(self) -> PageGeometry:
        """Of the pages that its runners want."""
        ...

    @property
    def num_bytes(self) -> int:
        """What one step has to read, at least."""
        ...

    def runner_over(self, pages: Pages) -> Runner:
        """A runner over `pages` [num_pages, page_bytes]; not warmed up yet. Raises ValueError for a wrong geometry."""
        ...


def import_libraries(arithmetic: Arithmetic) -> None:
    """All that takes long to import, and holds the interpreter's lock meanwhile."""
    if arithmetic == "fp32":
        import weir.model.torch.runner  # noqa: PLC0415
    else:
        import weir.model.cpu.runner  # noqa: F401, PLC0415
    _load_numba_registries()


def _load_numba_registries() -> None:
    """What numba reads before its first kernel. Where scipy is installed numba would import it for its BLAS, which
    takes as long again, and which no kernel calls: it is told that there is none."""
    from numba.core.registry import cpu_target  # noqa: PLC0415

    is_hidden = "scipy.linalg" not in sys.modules
    if is_hidden:
        sys.modules["scipy.linalg"] = None  # type: ignore[assignment]
    try:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
    finally:
        if is_hidden:
            del sys.modules["scipy.linalg"]


def load_model(
    source: ModelSource,
    precision: Precision,
    share: CoreShare,
    cache_dir: Path | None = None,
    *,
    max_context_tokens: int = 0,
) -> LoadedWeights:
    """Reads the weights. Packed ones are kept in `cache_dir`, by default the model cache. `max_context_tokens` as for
    `load_model_config`.

    Raises:
        ModelError: the files are not a model that Weir serves, or not in this precision.
    """
    config = load_model_config(source, max_context_tokens)
    if choose_arithmetic(precision, config) == "fp32":
        return _load_fp32(source, config, share.most)
    digest = model_digest(source, "int8", max_context_tokens=max_context_tokens)
    return _load_int8(source, config, digest, share, cache_dir or model_cache_dir())


@dataclass(frozen=True)
class Fp32Weights:
    """For PyTorch."""

    config: ModelConfig
    weights: "Weights"
    arithmetic: Arithmetic = "fp32"

    @property
    def page_geometry(self) -> PageGeometry:
        return page_geometry(self.config, self.arithmetic)

    @property
    def num_bytes(self) -> int:
        return self.weights.num_bytes

    def runner_over(self, pages: Pages) -> Runner:
        from weir.model.torch.runner import TorchRunner  # noqa: PLC0415

        return TorchRunner(self.config, self.weights, pages)


@dataclass(frozen=True)
class Int8Weights:
    """Packed, for the compiled kernels; `share` says on how many cores they run."""

    config: ModelConfig
    packed: "PackedWeights"
    share: CoreShare
    arithmetic: Arithmetic = "int8"

    @property
    def page_geometry(self) -> PageGeometry:
        return page_geometry(self.config, self.arithmetic)

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes

    def runner_over(self, pages: Pages) -> Runner:
        from weir.model.cpu.runner import CpuRunner  # noqa: PLC0415

        return CpuRunner(self.config, self.packed, pages, self.share)


def _load_fp32(source: ModelSource, config: ModelConfig, num_threads: int) -> LoadedWeights:
    import torch  # noqa: PLC0415

    from weir.model.torch.weights import load_weights  # noqa: PLC0415

    torch.set_num_threads(num_threads)
    return Fp32Weights(config, load_weights(source, config))


def _load_int8(
    source: ModelSource, config: ModelConfig, digest: str, share: CoreShare, cache_dir: Path
) -> LoadedWeights:
    from weir.model.cpu.packed_weights import load_packed  # noqa: PLC0415

    return Int8Weights(config, load_packed(source, config, digest, cache_dir), share)
