"""The command `weir`: one file a command, on typer and rich.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not running, 130 broken off with Ctrl-C.
"""
