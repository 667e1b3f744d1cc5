"""What commands end with. Imports nothing: the entry point needs it before anything is loaded."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_RUNNING = 3
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
