"""The command `weir`, on typer and rich. Nothing is imported here: the entry point needs it before all that is slow."""

# What commands end with; 0: done.
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_RUNNING = 3
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
