"""Everything that needs a GPU."""

import sys

from benchmarks.gpu.suite import main

if __name__ == "__main__":
    sys.exit(main())
