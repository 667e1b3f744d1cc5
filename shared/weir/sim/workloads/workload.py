"""What is asked of a simulated system: requests in the order of their arrival."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. `num_output_tokens` is the truth that only the modelled workers may know."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    lane: str = ""
    tenant: str = ""
    prefix_blocks: tuple[int, ...] = ()
    """Equal leading ids are an equal prefix of the prompt; each stands for `block_tokens` of the workload."""
    deadline_s: float = 0.0
    """From the arrival; 0: none."""
    ttft_target_s: float = 0.0
    """0: its lane's."""
    itl_target_s: float = 0.0
    """0: its lane's."""
    predicted_output_tokens: float = 0.0
    """0: no prediction."""
    output_score: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` by arrival time."""

    name: str
    requests: Sequence[SimRequest]
    block_tokens: int = 512
    """Of each of a request's `prefix_blocks`."""
