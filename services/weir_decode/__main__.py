"""`python -m weir_decode`: a decode worker."""

import os
import sys

from weir.worker.roles.kinds import run_worker


def main() -> int:
    """Returns the exit code."""
    return run_worker("decode", sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
