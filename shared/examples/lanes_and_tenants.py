"""Two tenants, a key each, and what each may do: python lanes_and_tenants.py HOST:PORT LIMITS.toml

For a stack whose scheduler follows that file: weir up --limits-file LIMITS.toml
"""

import os
import sys
import time
from pathlib import Path

from weir.client import GenerateOptions, WeirClient
from weir.core.credentials import key_digest, make_key
from weir.core.errors import PermissionDenied, QuotaExceeded, Unauthenticated, WeirError

# `weir limits key` makes keys too. The file gets digests alone: nobody can make a key of one.
SEARCH_KEY, REPORTS_KEY = make_key(), make_key()
LIMITS = f"""
[lanes.interactive]
max_queued = 100
max_wait_s = 10
guaranteed_share = 0.3

[lanes.standard]
max_queued = 1000
max_wait_s = 60

[lanes.batch]
max_queued = 10000
max_wait_s = 600

[tenants.search]
weight = 2
api_key_digests = ["{key_digest(SEARCH_KEY).hex()}"]

[tenants.reports]
lanes = ["batch"]
requests_per_min = 2
api_key_digests = ["{key_digest(REPORTS_KEY).hex()}"]
"""


def ask(address: str, api_key: str, lane: str = "") -> str:
    options = GenerateOptions(lane=lane, temperature=0, max_tokens=4)
    with WeirClient(address, api_key=api_key, timeout_s=60, ca=os.environ.get("WEIR_CA", "")) as client:
        return "".join(chunk.text for chunk in client.generate("The capital of France is", options))


def outcome(address: str, api_key: str, lane: str = "") -> str:
    try:
        return f"served:{ask(address, api_key, lane)!r}"
    except WeirError as error:
        return f"{type(error).__name__}: {error.message}"


def wait_until_in_force(address: str) -> None:
    """A new file is in force within a few seconds: then nobody is served without a key."""
    deadline = time.monotonic() + 15
    while not outcome(address, "").startswith(Unauthenticated.__name__):
        if time.monotonic() > deadline:
            raise TimeoutError("the limits are not in force: does the scheduler follow this file?")
        time.sleep(0.2)


def main(address: str, limits_path: str) -> int:
    Path(limits_path).write_text(LIMITS)
    wait_until_in_force(address)
    print("nobody       ", outcome(address, ""))
    print("search       ", outcome(address, SEARCH_KEY, "interactive"))
    print("reports      ", outcome(address, REPORTS_KEY))  # its default lane: the first that it may use
    refused = outcome(address, REPORTS_KEY, "interactive")
    print("reports      ", refused)
    assert refused.startswith(PermissionDenied.__name__)
    print("reports      ", outcome(address, REPORTS_KEY, "batch"))
    over = outcome(address, REPORTS_KEY, "batch")  # the third within a minute
    print("reports      ", over)
    assert over.startswith(QuotaExceeded.__name__)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
