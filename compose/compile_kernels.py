"""Compiles the CPU kernels into the model cache, for the processor on which an image is built.

Usage: compile_kernels.py MODEL

A worker that finds them there, on a processor of the same kind, compiles nothing; on another it compiles its own. The
packed weights, which are large and quickly made, are left to the first worker.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from weir.model.cpu.core_share import FixedShare
from weir.model.files.source import resolve_model
from weir.model.load import load_model


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        weights = load_model(resolve_model(sys.argv[1]), "int8", FixedShare(1), Path(folder))
        weights.runner_over(np.zeros((1, weights.page_geometry.page_bytes), np.uint8)).warm_up()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
