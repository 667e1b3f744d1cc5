"""Where the trace files of benchmarks are: in the folder `traces` of WEIR_TEST_DATA."""

import os
from pathlib import Path

from weir.bench.simulator import DATA_VARIABLE

AZURE = "azure_2023_code.csv"
MOONCAKE = "mooncake_conversation.jsonl.gz"


class TracesMissing(ValueError):
    """Trace files that are needed are not on this machine."""


def traces_folder(*needed: str) -> Path:
    """Raises TracesMissing, naming what lacks."""
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        raise TracesMissing(f"{DATA_VARIABLE} is not set: a folder whose folder `traces` has the trace files")
    folder = Path(root) / "traces"
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise TracesMissing(f"{folder} lacks {', '.join(missing)}")
    return folder
