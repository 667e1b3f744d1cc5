"""Loads a worker's model while the worker does other things, in the arithmetic and on the cores that it may use."""

import logging
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from weir.core.device import Arithmetic
from weir.core.errors import InternalError
from weir.engine.batching.batcher import BatchLimits
from weir.engine.memory.swapping import HostPages, PageBytes
from weir.engine.plan import ModelRunner
from weir.grammar.protocol import GrammarEngine, GrammarError
from weir.kv.memory.device import ArenaMemory
from weir.model.cpu.core_share import CoreShare, FixedShare
from weir.model.device_check import check_device
from weir.model.errors import ModelError
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.source import ModelSource, resolve_model
from weir.model.precision import choose_arithmetic, int8_obstacle, page_geometry
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vocabulary import vocabulary_of
from weir.runtime.extras import check_extra
from weir.worker.config import WorkerConfig
from weir.worker.engine.core_budget import CoreBudget

if TYPE_CHECKING:
    from weir.model.load import LoadedWeights
    from weir.model.triton.load import DeviceWeights

_LOAD_TIMEOUT_S = 600.0
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What is known of a model without loading it. `page_bytes`: of its pages in the configured precision. `window`: no
    layer sees more positions; None: some see all."""

    name: str
    vocab_size: int
    max_context_tokens: int
    digest: str
    page_bytes: int
    window: int | None = None

    def batch_limits(self, config: WorkerConfig) -> BatchLimits:
        return BatchLimits(
            max_num_seqs=config.most_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunk_tokens=config.chunk_tokens,
            max_context_tokens=self.max_context_tokens,
            vocab_size=self.vocab_size,
            max_stall_s=config.max_stall_s,
            target_step_s=config.target_step_ms / 1e3 or math.inf,
            window=self.window,
        )


def read_model_spec(config: WorkerConfig) -> ModelSpec:
    """Reads every byte of the weights once, for their digest: call it in a thread. Raises ModelError."""
    source = resolve_model(config.model_reference)
    longest = config.max_context_tokens
    model = load_model_config(source, longest)
    pages = page_geometry(model, choose_arithmetic(config.precision, model, config.device))
    digest = model_digest(source, config.precision, config.device, exact=config.exact, max_context_tokens=longest)
    name = config.served_model_name or source.name
    return ModelSpec(name, model.vocab_size, model.max_context_tokens, digest, pages.page_bytes, model.longest_window)


def no_grammars() -> GrammarEngine:
    """Raises GrammarError."""
    raise GrammarError("this worker holds no answers to grammars")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner over an arena's pages, what makes it fast once run in the engine's thread, and these pages as bytes."""

    runner: ModelRunner
    warm_up: Callable[[], None]
    pages: PageBytes
    grammar_engine: Callable[[], GrammarEngine] = no_grammars
    """Over the model's vocabulary. Raises GrammarError."""


@dataclass(frozen=True)
class Loading:
    """A model on its way into memory."""

    imports: "Future[None]"
    grammars: "Future[GrammarEngine]"
    over: Callable[[ArenaMemory], LoadedModel]
    """Waits for the weights: call it in a thread. Raises what loading has raised."""

    def wait_for_imports(self) -> None:
        """Until no library of the model has to be imported any more, nor its vocabulary read; raises what the first
        has raised.

        Either may hold the interpreter's lock for seconds. A process that has a lease cannot renew it meanwhile, and
        one that loses its lease is killed: attach to no arena before.
        """
        self.imports.result(_LOAD_TIMEOUT_S)
        wait([self.grammars], _LOAD_TIMEOUT_S)


def begin_loading(config: WorkerConfig, spec: "Future[ModelSpec]") -> Loading:
    """Begins at once, in threads of its own: it takes seconds, in which the transfer service makes its arena.

    Weights on a device wait for `spec`: its digest says whether another worker has them already.

    Raises ExtraMissing and DeviceMissing at once.
    """
    check_extra("worker", "a worker")
    check_device(config.device)
    grammars = start_in_thread(lambda: load_grammar_engine(config), "vocabulary")
    if config.device == "cpu":
        imports = start_in_thread(lambda: import_for_cpu(config), "imports")
        weights = start_in_thread(lambda: _load(config, imports), "weights")
        return Loading(imports, grammars, lambda arena: _over_segment(weights, arena, grammars))
    imports = start_in_thread(lambda: _import_for_device(config), "imports")
    on_device = start_in_thread(lambda: _load_on_device(config, imports, spec), "weights")
    return Loading(imports, grammars, lambda arena: _over_device(on_device, arena, config, grammars))


def load_grammar_engine(config: WorkerConfig) -> GrammarEngine:
    """Over the model's vocabulary. Raises GrammarError."""
    try:
        source = resolve_model(config.model_reference)
        return _grammar_engine_of(source, source.state())
    except ModelError as error:
        raise GrammarError(f"this worker cannot read the model's vocabulary: {error}") from error


@lru_cache(maxsize=1)
def _grammar_engine_of(source: ModelSource, state: tuple[int, ...]) -> GrammarEngine:
    """Kept: a process that is forked into several workers of a model reads its vocabulary once for all of them."""
    del state
    from weir.grammar.llguidance_engine import LlguidanceEngine  # noqa: PLC0415 - in this thread and not before

    model, tokenizer = load_model_config(source), load_tokenizer(source)
    return LlguidanceEngine(vocabulary_of(tokenizer, model.vocab_size, model.eos_token_ids))


def start_in_thread(work: Callable[[], _T], name: str) -> "Future[_T]":
    """The result to come. The thread is a daemon: a process that ends early does not wait for it."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets the error
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def core_share_of(config: WorkerConfig, arithmetic: Arithmetic) -> CoreShare:
    """A fixed number of threads if one is set, or for PyTorch; else a share of the machine's budget of cores."""
    num_cores = len(os.sched_getaffinity(0))
    equal_share = FixedShare(config.num_threads or max(1, num_cores // config.workers_on_machine))
    if config.num_threads or arithmetic == "fp32":
        return equal_share
    path = config.core_budget_path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return CoreBudget(path, num_cores)
    except OSError as error:
        _log.warning("no common budget of cores (%s): %d threads, busy or not", error, equal_share.most)
        return equal_share


def _over_segment(
    weights: "Future[LoadedWeights]", arena: ArenaMemory, grammars: "Future[GrammarEngine]"
) -> LoadedModel:
    pages = arena.segment.pages
    runner = weights.result(_LOAD_TIMEOUT_S).runner_over(pages)
    return LoadedModel(runner, runner.warm_up, HostPages(pages), grammars.result)


def _over_device(
    weights: "Future[DeviceWeights]", arena: ArenaMemory, config: WorkerConfig, grammars: "Future[GrammarEngine]"
) -> LoadedModel:
    if arena.pages is None:
        raise InternalError(f"device {config.device}: the pages of this arena are in its segment")
    runner = weights.result(_LOAD_TIMEOUT_S).runner_over(
        arena.pages,
        arena.segment.geometry,
        max_rows=config.max_num_batched_tokens,
        max_sequences=config.most_num_seqs,
        is_exact=config.exact,
    )
    return LoadedModel(runner, runner.warm_up, runner.pages, grammars.result)


def _import_for_device(config: WorkerConfig) -> None:
    from weir.model.triton.load import start_device  # noqa: PLC0415 - imports torch

    start_device(config.device, core_share_of(config, "fp32").most)


def _load_on_device(config: WorkerConfig, imports: "Future[None]", spec: "Future[ModelSpec]") -> "DeviceWeights":
    imports.result(_LOAD_TIMEOUT_S)
    from weir.model.triton.load import SharedWeights, load_on_device  # noqa: PLC0415 - imported by another thread

    source = resolve_model(config.model_reference)
    share = core_share_of(config, "fp32")
    shared = SharedWeights(config.weights_socket_path, spec.result(_LOAD_TIMEOUT_S).digest)
    longest = config.max_context_tokens
    weights = load_on_device(source, config.precision, config.device, share.most, shared, max_context_tokens=longest)
    is_read_here = weights.slab is None or weights.slab.was_filled_here
    _log.info(
        "%s in %s by Triton kernels%s, device %s, %.0f MB, %s",
        source.name,
        weights.arithmetic,
        ", exact" if config.exact else "",
        config.device,
        weights.num_bytes / 1e6,
        "read here" if is_read_here else "of another worker",
    )
    return weights


def import_for_cpu(config: WorkerConfig) -> None:
    """The libraries of its model's arithmetic. Raises ModelError."""
    from weir.model.load import import_libraries  # noqa: PLC0415 - numpy and more, in this thread and not before

    model_config = load_model_config(resolve_model(config.model_reference))
    import_libraries(choose_arithmetic(config.precision, model_config, exact=config.exact))


def _load(config: WorkerConfig, imports: "Future[None]") -> "LoadedWeights":
    imports.result(_LOAD_TIMEOUT_S)
    from weir.model.load import load_model  # noqa: PLC0415 - imported by another thread

    source = resolve_model(config.model_reference)
    model_config = load_model_config(source)
    arithmetic = choose_arithmetic(config.precision, model_config, exact=config.exact)
    if config.precision == "auto" and arithmetic == "fp32":
        _log.warning("%s runs in fp32: %s", source.name, int8_obstacle(model_config))
    share = core_share_of(config, arithmetic)
    weights = load_model(source, config.precision, share, max_context_tokens=config.max_context_tokens)
    if config.exact:
        _log.info("the setting exact changes nothing: %s on a CPU is exact in any case", arithmetic)
    _log.info("%s in %s, %.0f MB, at most %d threads", source.name, arithmetic, weights.num_bytes / 1e6, share.most)
    return weights
