"""`python -m weir_prefill`: a prefill worker."""

import os
import sys
from collections.abc import Mapping, Sequence

from weir.worker.roles.kinds import prepare_workers, run_worker


def prepare_for(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """For a process that is to be forked into one with these flags."""
    prepare_workers("prefill", words, environ)


def main() -> int:
    """Returns the exit code."""
    return run_worker("prefill", sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
