"""From a model's files to something that runs steps."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weir.model.config import ModelConfig, load_model_config
from weir.model.runner import TorchRunner
from weir.model.source import ModelSource
from weir.model.weights import Weights, load_weights


@dataclass(frozen=True)
class LoadedWeights:
    """A model in memory, not yet at any pages."""

    config: ModelConfig
    weights: Weights

    def runner_over(self, pages: npt.NDArray[np.uint8]) -> TorchRunner:
        """A runner over `pages` [num_pages, page_bytes]; not warmed up yet. Raises ValueError for a wrong geometry."""
        return TorchRunner(self.config, self.weights, pages)


def load_model(source: ModelSource, num_threads: int) -> LoadedWeights:
    """Reads the weights; `num_threads` is set for the whole process.

    Raises:
        ModelError: the files are not a model that Weir serves.
        ValueError: `num_threads` is not positive.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}, expected at least 1")
    torch.set_num_threads(num_threads)
    config = load_model_config(source)
    return LoadedWeights(config, load_weights(source, config))
