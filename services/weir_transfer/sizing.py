"""The size of the arena and the longest sequence in it: as configured, or what fits this machine and the model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from glob import escape

from weir.core.fields import format_size
from weir.kv.arena.segment import try_read_header
from weir.kv.arena_size import (
    LEAST_CONTEXT_TOKENS,
    FreeMemory,
    arena_bytes_for,
    bytes_for_context,
    longest_context,
)
from weir.kv.geometry import PAGE_TOKENS, ArenaGeometry, least_arena_pages, num_reservable_pages
from weir.kv.layout import bytes_for_pages, geometry_within
from weir.kv.memory.cuda import CudaDriver
from weir.kv.memory.device import try_memory_kind
from weir.model.device_check import read_gpu
from weir.model.device_sizes import StepBounds, arena_bytes_on_gpu, max_num_seqs_on_gpu
from weir.model.files.catalog import model_cache_dir
from weir.model.files.config import load_model_config
from weir.model.files.source import ModelKind, ModelSource, resolve_model
from weir.model.memory import stack_bytes
from weir.model.precision import choose_arithmetic
from weir.runtime.machine_memory import available_bytes, free_disk_bytes
from weir_transfer.config import TransferConfig

_UNKNOWN_MODEL_BYTES = 2 << 30
"""Of an arena on a GPU for a model of which only the page size is known."""
_MOST_BATCHED_TOKENS = 2048  # of a worker, by default
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """`text`: one line for people."""

    geometry: ArenaGeometry
    text: str


def size_arena(
    config: TransferConfig,
    complete: TransferConfig,
    look: Callable[[TransferConfig], FreeMemory] | None = None,
    ask_gpu: Callable[[], int] | None = None,
) -> ArenaSize:
    """`config` as it was given, `complete` with the model's page size, context and digest. `look`: at this machine;
    `ask_gpu`: for the bytes of its memory.

    A segment that is there already keeps the size that was chosen for it, so that a transfer service that starts again
    finds its arena. Raises ValueError: what was asked for does not fit.
    """
    shape = ArenaGeometry(
        complete.page_bytes,
        0,
        complete.num_slots,
        complete.max_context_tokens,
        pages_on_device=try_memory_kind(complete.device) is not None,
    )
    is_context_asked = config.max_context_tokens > 0
    if config.arena_bytes:
        return _within(config.arena_bytes, shape, is_context_asked=is_context_asked, is_size_asked=True)
    kept = _try_find_kept(complete, shape, is_context_asked=is_context_asked)
    if kept is not None:
        return ArenaSize(kept, _text(kept, shape, is_size_asked=False))
    if config.device == "cuda":
        arena_bytes = _gpu_arena_bytes(config, shape, (ask_gpu or _gpu_bytes)() // config.models_on_machine)
    else:
        free = look(config) if look is not None else look_at_machine(config, complete.model_digest)
        arena_bytes = arena_bytes_for(shape, free, is_context_asked=is_context_asked)
    return _within(arena_bytes, shape, is_context_asked=is_context_asked, is_size_asked=False)


def look_at_machine(config: TransferConfig, digest: str) -> FreeMemory:
    """What is free for pages in the memory of this host, beside the workers that will start there; of several models
    each has an equal part.

    `digest`: of the model that they will load.
    """
    taken_bytes = 0
    if not config.model_digest:
        source = resolve_model(config.model_reference)
        model = load_model_config(source)
        arithmetic = choose_arithmetic(config.precision, model, config.device)
        packs_floats = source.kind is not ModelKind.GGUF and not _is_packed(source, digest)
        taken_bytes = stack_bytes(
            model, arithmetic, config.device, config.workers_on_machine, packs_floats=packs_floats
        )
    share = config.models_on_machine
    return FreeMemory(available_bytes() // share - taken_bytes, free_disk_bytes(config.segment_dir) // share)


def _is_packed(source: ModelSource, digest: str) -> bool:
    """Whether an earlier start has packed the weights, in any version of the format."""
    name = escape(f"{source.file_stem}-{digest}")
    return any((model_cache_dir() / "packed").glob(f"{name}-*.weights"))


def _gpu_bytes() -> int:
    """All of its memory: what is free changes while workers load, which they do at the same time."""
    return read_gpu(CudaDriver.load()).total_bytes


def _gpu_arena_bytes(config: TransferConfig, shape: ArenaGeometry, gpu_bytes: int) -> int:
    """What the workers leave of the GPU, but no more than all slots can fill. Raises ModelError if they leave nothing.

    Nothing is touched when it is taken, so that it costs no time, and nothing else is meant to be on the GPU.
    """
    if config.model_digest:
        return _UNKNOWN_MODEL_BYTES
    model = load_model_config(resolve_model(config.model_reference))
    arithmetic = choose_arithmetic(config.precision, model, config.device)
    bounds = StepBounds(_MOST_BATCHED_TOKENS, max_num_seqs_on_gpu(gpu_bytes), shape.max_context_tokens)
    left_bytes = arena_bytes_on_gpu(model, arithmetic, bounds, gpu_bytes, config.workers_on_machine)
    most_pages = least_arena_pages(shape.num_slots * shape.max_pages_per_sequence) + 1
    return min(left_bytes, most_pages * shape.page_bytes)


def _within(arena_bytes: int, shape: ArenaGeometry, *, is_context_asked: bool, is_size_asked: bool) -> ArenaSize:
    longest = longest_context(arena_bytes, shape)
    is_enough = longest == shape.max_context_tokens or (longest >= LEAST_CONTEXT_TOKENS and not is_context_asked)
    fitting = replace(shape, max_context_tokens=longest if is_enough else shape.max_context_tokens)
    try:
        geometry = geometry_within(
            arena_bytes,
            fitting.page_bytes,
            fitting.num_slots,
            fitting.max_context_tokens,
            pages_on_device=fitting.pages_on_device,
        )
    except ValueError as error:
        fits = f"; {longest} would fit" if longest >= LEAST_CONTEXT_TOKENS else ""
        whose = "" if is_size_asked else " (arena_bytes is what the memory that is free allows: `weir doctor`)"
        raise ValueError(f"{error}{fits}{whose}") from error
    return ArenaSize(geometry, _text(geometry, shape, is_size_asked=is_size_asked))


def _try_find_kept(complete: TransferConfig, shape: ArenaGeometry, *, is_context_asked: bool) -> ArenaGeometry | None:
    header = try_read_header(complete.segment_path)
    if header is None or header.model_digest != complete.model_digest:
        return None
    kept = header.geometry
    is_same_shape = replace(shape, num_pages=kept.num_pages, max_context_tokens=kept.max_context_tokens) == kept
    is_long_enough = kept.max_context_tokens == shape.max_context_tokens or not is_context_asked
    return kept if is_same_shape and is_long_enough else None


def _text(geometry: ArenaGeometry, shape: ArenaGeometry, *, is_size_asked: bool) -> str:
    num_tokens = num_reservable_pages(geometry.num_pages) * PAGE_TOKENS
    size = f"arena of {format_size(bytes_for_pages(geometry))}, room for {num_tokens:,} tokens"
    longest, whole = geometry.max_context_tokens, shape.max_context_tokens
    if longest == whole:
        return f"{size}; max_context_tokens {longest}"
    needed = f"--arena-bytes {-(-bytes_for_context(shape) // _MIB)}MiB"
    remedy = needed if is_size_asked else f"{needed}, where that is free,"
    return f"{size}; max_context_tokens is {longest}, not the model's {whole}: {remedy} would hold it"
