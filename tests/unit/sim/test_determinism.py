"""The same arguments give the same bytes, in whatever process."""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_RUN = """
import hashlib
from tests.unit.sim.loads import PROFILE, poisson_load, shared_prompts
from weir.policy.registry import PolicySpec
from weir.sim.simulator import simulate
from weir.sim.spec import LinkSpec, SystemSpec

lines = []
for workload in (poisson_load(30, 30.0), shared_prompts(30, 30.0)):
    for spec in (SystemSpec.colocated(3, PROFILE), SystemSpec.split(2, 2, PROFILE, link=LinkSpec(10.0))):
        for policy in ("fcfs", "srtf", "slai"):
            result = simulate(spec, workload, policy=PolicySpec(policy))
            lines.append(repr((result.outcomes, result.gap_counts_by_ms, result.queue_lengths,
                               sorted(result.tenant_service.items()), sorted(result.counters.items()))))
print(hashlib.sha256("\\n".join(lines).encode()).hexdigest())
"""


def digest_in_a_process_with(hash_seed: str) -> str:
    environ = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _RUN]
    run = subprocess.run(command, env=environ, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=100)
    return run.stdout


def test_the_same_workload_gives_the_same_result_byte_for_byte_whatever_the_order_of_sets() -> None:
    assert digest_in_a_process_with("1") == digest_in_a_process_with("2")
