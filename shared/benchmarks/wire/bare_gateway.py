"""`python -m benchmarks.wire.bare_gateway`: the gateway without what it counts of each token and stage of a request.
What metrics cost is what the real one costs more.
"""

import sys
from typing import Any

from weir_gateway import __main__ as gateway
from weir_gateway.requests.request_times import RequestTimes


def _nothing(self: RequestTimes, *_: Any) -> None:
    del self


if __name__ == "__main__":
    for name in ("on_tokens", "on_phase", "end"):
        setattr(RequestTimes, name, _nothing)
    sys.exit(gateway.main())
