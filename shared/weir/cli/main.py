"""The entry point of `weir`. Imports nothing heavy: from its first line on Ctrl-C ends quietly."""

import os
import signal
import sys

from weir.cli import EXIT_INTERRUPTED


def main() -> None:
    """Runs the command line; Ctrl-C ends it quietly, also while its modules are still being loaded."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        # Nothing is begun yet, and a KeyboardInterrupt would come out of an extension's import as another error.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))
    from weir.cli.app import app

    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app(prog_name="weir")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
