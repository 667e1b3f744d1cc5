"""From a model's files to something that runs steps."""

import numpy as np
import numpy.typing as npt
import torch

from weir.model.config import load_model_config
from weir.model.runner import TorchRunner
from weir.model.source import ModelSource
from weir.model.weights import load_weights


def load_runner(source: ModelSource, pages: npt.NDArray[np.uint8], num_threads: int) -> TorchRunner:
    """A runner over `pages` [num_pages, page_bytes]; `num_threads` is set for the whole process. Not warmed up yet.

    Raises:
        ModelError: the files are not a model that Weir serves.
        ValueError: the pages are not of this model's geometry, or `num_threads` is not positive.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}, expected at least 1")
    torch.set_num_threads(num_threads)
    config = load_model_config(source)
    return TorchRunner(config, load_weights(source, config), pages)
