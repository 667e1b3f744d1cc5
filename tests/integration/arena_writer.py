"""A worker process for tests: `python arena_writer.py SOCKET`.

Takes a lease, four pages and a slot, publishes a sequence with three of the pages, prints what it has, and writes into
its pages from a thread, without end.
"""

import asyncio
import json
import sys
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.integration.arena_process import MODEL_DIGEST, PAGE_BYTES

from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.records.record import SequenceParams
from weir.rpc.arena.client import ArenaClient, WorkerIdentity


def _write_for_ever(pages: NDArray[np.uint8], page_ids: tuple[int, ...]) -> None:
    counter = 0
    while True:
        counter += 1
        for page_id in page_ids:
            pages[page_id].view(np.uint64)[:] = counter


async def _main(socket_path: Path) -> None:
    client = ArenaClient(
        socket_path, WorkerIdentity("writer", "prefill", PAGE_BYTES, MODEL_DIGEST), on_handed_off=print
    )
    await client.start()
    acquired = await client.acquire(4, 1)
    record = client.segment.record(acquired.slots[0])
    params = SequenceParams("r1", Attempt(), "gateway", (1, 2), SamplingParams(), StopRules(max_tokens=9), 3, "")
    record.begin(params)
    record.set_block_table(acquired.page_ids[:3])
    record.publish(num_computed_tokens=2)
    threading.Thread(target=_write_for_ever, args=(client.segment.pages, acquired.page_ids), daemon=True).start()
    sys.stdout.write(json.dumps({"page_ids": acquired.page_ids, "slot": acquired.slots[0]}) + "\n")
    sys.stdout.flush()
    await client.lost.wait()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
