"""Loads a worker's model while the worker does other things, in the arithmetic and on the cores that it may use."""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from weir.kv.segment import Segment
from weir.model.config import load_model_config
from weir.model.core_share import CoreShare, FixedShare
from weir.model.precision import Arithmetic, choose_arithmetic, int8_obstacle
from weir.model.source import resolve_model
from weir.worker.background import begin
from weir.worker.config import WorkerConfig
from weir.worker.core_budget import CoreBudget

if TYPE_CHECKING:
    from weir.model.load import LoadedWeights, Runner

_LOAD_TIMEOUT_S = 600.0
_log = logging.getLogger(__name__)


def begin_loading(config: WorkerConfig) -> "Callable[[Segment], Runner]":
    """Begins at once, in a thread of its own: it takes seconds, in which the transfer service makes its arena.

    The returned function waits for the weights, and raises what loading has raised.
    """
    weights = begin(lambda: _load(config), "weights")
    return lambda segment: weights.result(_LOAD_TIMEOUT_S).runner_over(segment.pages)


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


def _load(config: WorkerConfig) -> "LoadedWeights":
    from weir.model.load import load_model  # noqa: PLC0415 - numpy and more, in this thread and not before

    source = resolve_model(config.model_reference)
    model_config = load_model_config(source)
    arithmetic = choose_arithmetic(config.precision, model_config)
    if config.precision == "auto" and arithmetic == "fp32":
        _log.warning("%s runs in fp32: %s", source.name, int8_obstacle(model_config))
    share = core_share_of(config, arithmetic)
    weights = load_model(source, config.precision, share)
    _log.info("%s in %s, %.0f MB, at most %d threads", source.name, arithmetic, weights.num_bytes / 1e6, share.most)
    return weights
