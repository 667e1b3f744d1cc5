"""Commands at hosts of a lab, to measure between them or to look around: the last one's output is shown, and ends it.

    python -m tests.hosts --rate-mbit 1000 \\
        "a: python -m benchmarks.wire.page_stream --serve a:7000" \\
        "b: python -m benchmarks.wire.page_stream --pull a:7000"
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts.lab import Lab
from tests.hosts.namespaces import why_impossible

_SHM_BYTES = 4 << 30
_BEGUN_S = 5.0
_TIMEOUT_S = 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "commands", nargs="+", metavar="HOST: COMMAND", help="each begun some seconds after the last one"
    )
    parser.add_argument("--rate-mbit", type=float, help="of each link; default: what the machine can do")
    asked = parser.parse_args()
    problem = why_impossible()
    if problem is not None:
        print(problem, file=sys.stderr)
        return 1
    commands = [
        (name.strip(), shlex.split(command)) for name, _, command in (one.partition(":") for one in asked.commands)
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
        hosts = {name: lab.host(name, shm_bytes=_SHM_BYTES) for name in dict.fromkeys(name for name, _ in commands)}
        for host in hosts.values():
            if asked.rate_mbit:
                host.shape(asked.rate_mbit)
        for name, command in commands[:-1]:
            hosts[name].start(command, log=Path(folder, f"{name}.log"), env={"PATH": path})
            time.sleep(_BEGUN_S)
        name, command = commands[-1]
        try:
            print(hosts[name].run(*command, env={"PATH": path}, timeout_s=_TIMEOUT_S), end="")
        except RuntimeError as error:
            print(error, *(log.read_text() for log in sorted(Path(folder).glob("*.log"))), sep="\n", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
