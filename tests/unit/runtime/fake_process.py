"""A process for a supervisor to look after: writes its ready file, waits, and perhaps fails.

    python fake_process.py READY_FILE [--crash-s SECONDS] [--exit-code N] [--ignore-term] [--never-ready] …

Without third-party imports, so that a test can start dozens.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ready_file", type=Path)
    parser.add_argument("--crash-s", type=float)
    parser.add_argument("--exit-code", type=int, default=7)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--ended-file", type=Path)
    parser.add_argument("--note", action="append", default=[])
    flags = parser.parse_args()
    sys.stdout.write(f"I am {os.getpid()}\n")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if flags.ignore_term else lambda *_: end(flags.ended_file))
    listener = socket.socket(socket.AF_UNIX)
    if flags.socket is not None:
        flags.socket.unlink(missing_ok=True)
        listener.bind(str(flags.socket))
    if not flags.never_ready:
        unfinished = flags.ready_file.with_suffix(".new")
        unfinished.write_text(json.dumps({"pid": os.getpid(), "address": f"fake:{os.getpid()}", "notes": flags.note}))
        unfinished.replace(flags.ready_file)
    if flags.crash_s is not None:
        time.sleep(flags.crash_s)
        sys.stdout.write("I cannot go on: the well is dry\n")
        sys.exit(flags.exit_code)
    while True:
        signal.pause()


def end(ended_file: Path | None) -> None:
    if ended_file is not None:
        with ended_file.open("a") as ended:
            ended.write(f"{os.getpid()} {time.monotonic()}\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
