"""Whether weights fit: a machine that runs out of memory kills processes, and not always the one that asked."""

import math
from pathlib import Path

from weir.model.architecture import ModelConfig
from weir.model.errors import ModelError
from weir.model.files.source import ModelSource
from weir.model.files.tensor_names import tensor_shapes

_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_memory(source: ModelSource, config: ModelConfig, bytes_a_weight: float) -> None:
    """Raises ModelError if all weights together need more memory than there is. Call it before the first is read."""
    needed_bytes = bytes_a_weight * sum(math.prod(shape) for shape in tensor_shapes(config).values())
    found_bytes = available_bytes(_MEMINFO, _GROUP_LIMIT)
    if needed_bytes > found_bytes:
        raise ModelError(
            f"model {source.name!r} needs {needed_bytes / 2**30:.1f} GiB for its weights at {bytes_a_weight:g} bytes "
            f"each, but only {found_bytes / 2**30:.1f} GiB of memory are available; choose a smaller model, or a "
            "precision of fewer bytes"
        )


def available_bytes(meminfo: Path, group_limit: Path) -> float:
    """What Linux says that it can still give, and no more than this process's control group (v2) may have in all."""
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    bounds = [float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit = group_limit.read_text().strip() if group_limit.is_file() else "max"
    if limit != "max":
        bounds.append(float(limit))
    return min(bounds, default=math.inf)
