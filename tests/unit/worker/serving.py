"""What a gateway does at both workers."""

import threading

from tests.unit.worker.rig import (
    TIMEOUT_S,
    Stream,
    resume_command,
)

from weir.wire.v1 import worker_pb2

GATEWAY = "gateway-0-11111111"


def hold(release: threading.Event) -> None:
    """Keeps a step from ending."""
    assert release.wait(TIMEOUT_S)


async def begin(streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    """As a gateway does: the decode worker is asked first."""
    await streams[1].send(resume=resume_command(start))
    await streams[0].send(start=start)
