"""kill -9 of a worker while it publishes: what is read afterwards is whole, and has all that was acknowledged."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from weir.kv.arena.segment import Segment
from weir.kv.geometry import ArenaGeometry

_GEOMETRY = ArenaGeometry(page_bytes=4096, num_pages=4096, num_slots=1, max_context_tokens=60_000)
_ROUNDS = 12
_PROGRAM = """
import sys
from pathlib import Path
from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.records.record import SequenceParams
from weir.kv.arena.segment import Segment

record = Segment.open(Path(sys.argv[1])).record(0)
record.begin(SequenceParams("r", Attempt(), "g", (7, 8, 9), SamplingParams(), StopRules(max_tokens=50_000), 1, ""))
record.publish(num_computed_tokens=0)
sys.stdout.buffer.write(b"begun\\n")
for index in range(50_000):
    record.append_token(index * 3)
    if index % 16 == 0:
        record.append_page(index // 16)
    record.publish(num_computed_tokens=3 + index)
    if index % 128 == 0:
        record.drop_first_pages(index // 16)
    sys.stdout.buffer.write(index.to_bytes(4, "little"))
    sys.stdout.buffer.flush()
"""


def test_a_kill_at_any_moment_leaves_a_whole_record(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path / "arena", _GEOMETRY, "digest")
    chance = random.Random(20)
    lengths = set()
    for _ in range(_ROUNDS):
        segment.record(0).clear()
        command = [sys.executable, "-c", _PROGRAM, str(segment.path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as writer:
            assert writer.stdout is not None
            assert writer.stdout.read(6) == b"begun\n"
            time.sleep(chance.uniform(0, 0.01))
            writer.send_signal(signal.SIGKILL)
            acknowledged = len(writer.stdout.read()) // 4
        snapshot = segment.record(0).read()
        assert snapshot is not None
        num_output = len(snapshot.output_token_ids)
        assert num_output >= acknowledged
        assert snapshot.params.prompt_token_ids == (7, 8, 9)
        assert snapshot.output_token_ids == tuple(3 * index for index in range(num_output))
        assert snapshot.block_table == tuple(range(-(-num_output // 16)))
        # of what was acknowledged pages may be somebody else's; of the step after that they may be on their way there
        least, most = (max(0, number - 1) // 128 * 8 for number in (acknowledged, num_output))
        assert least <= snapshot.first_page <= most
        assert (snapshot.num_computed_tokens, snapshot.rng_position) == (
            2 + num_output if num_output else 0,
            num_output,
        )
        lengths.add(num_output)
    assert len(lengths) > 3, "it was killed at different moments"
    segment.close()
