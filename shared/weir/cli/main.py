"""The entry point of `weir`. Imports nothing heavy: from its first line on Ctrl-C ends quietly."""

import sys

from weir.cli import EXIT_INTERRUPTED
from weir.cli.loading import ends_quietly


def main() -> None:
    """Runs the command line; Ctrl-C ends it quietly, also while its modules are still being loaded."""
    try:
        with ends_quietly():
            from weir.cli.app import app
        app(prog_name="weir")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
