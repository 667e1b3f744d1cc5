"""An urgent lane with a guaranteed share, while another lane floods the system; and what the guarantee costs."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size
from benchmarks.sim.report import show
from weir.core.cost import PromptChunk
from weir.scheduling.limits import CoreLimits, LaneLimits
from weir.sim.profile import load_profile
from weir.sim.results.metrics import Estimate, mean_estimate, summarize
from weir.sim.simulator import simulate
from weir.sim.spec import LinkSpec, SystemSpec
from weir.sim.workloads.workload import Lengths, Workload, draw, merge, poisson, with_values

_PROFILE = "h100-llama3-8b"
_CHUNK_TOKENS = 2048
_GUARANTEE = 0.3
_ALONE, _LANES, _NO_LANE = "urgent alone", "flood, urgent lane", "flood, no lane"
_IDLE_LANE, _IDLE_NO_LANE = "flood alone, urgent lane idle", "flood alone, no lane"
_SPLIT, _COLOCATED = "1 prefill + 1 decode", "1 colocated"
_SYSTEMS = (_SPLIT, _COLOCATED)


def _system(name: str) -> SystemSpec:
    profile = load_profile(_PROFILE)
    if name == _SPLIT:
        return SystemSpec.split(1, 1, profile, link=LinkSpec(25.0), chunk_tokens=_CHUNK_TOKENS)
    return SystemSpec.colocated(1, profile, chunk_tokens=_CHUNK_TOKENS)


def _workload(arm: str, duration_s: float, seed: int) -> Workload:
    """Short urgent questions, one a second; a flood of long work at about twice what one worker can do."""
    source = np.random.default_rng(seed)
    urgent = _sampled("urgent", 1.0, (100, 1000), (20, 200), duration_s, source)
    flood = _sampled("flood", 20.0, (1000, 4000), (200, 600), duration_s, source)
    if arm == _ALONE:
        return urgent
    if arm in (_IDLE_LANE, _IDLE_NO_LANE):
        return flood
    return merge("both", (urgent, flood))


def _sampled(
    name: str,
    rate_a_s: float,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
    duration_s: float,
    source: np.random.Generator,
) -> Workload:
    num = round(rate_a_s * duration_s)
    lengths = [
        Lengths(num_prompt, num_output)
        for num_prompt, num_output in zip(
            source.integers(*prompts, num).tolist(), source.integers(*outputs, num).tolist(), strict=True
        )
    ]
    return draw(lengths, poisson(rate_a_s, num, source), source, name=name, tenant=name, max_tokens=outputs[1])


def _limits(arm: str) -> CoreLimits:
    """Whether there is a lane or not, tenants' fairness does not help: one queue a lane, by arrival."""
    batch = LaneLimits("batch", max_queued=50_000, max_wait_s=86_400.0)
    if arm in (_NO_LANE, _IDLE_NO_LANE):
        return CoreLimits(lanes=(batch,), default_lane="batch", tenant_order="arrival")
    urgent = LaneLimits("interactive", max_queued=1000, max_wait_s=600.0, guaranteed_share=_GUARANTEE)
    return CoreLimits(lanes=(urgent, batch), default_lane="batch", tenant_order="arrival")


def _in_lanes(workload: Workload) -> Workload:
    lanes = {"urgent": "interactive", "flood": "batch"}
    return with_values(workload, lane=[lanes[request.tenant] for request in workload.requests])


def _run(arm: str, system: str, duration_s: float, seed: int) -> Mapping[str, float]:
    workload = _workload(arm, duration_s, seed)
    if arm not in (_NO_LANE, _IDLE_NO_LANE):
        workload = _in_lanes(workload)
    result = simulate(_system(system), workload, limits=_limits(arm))
    everyone = summarize(result)
    who = "urgent" if arm in (_ALONE, _LANES, _NO_LANE) else "flood"
    of_them = summarize(result, wanted=lambda outcome: outcome.tenant == who)
    return {
        "p50_ttft_s": of_them.p50_ttft_s,
        "p99_ttft_s": of_them.p99_ttft_s,
        "p99_worst_gap_s": of_them.p99_worst_gap_s,
        "output_tokens_a_s": everyone.output_tokens_a_s,
        "finished_share": everyone.num_finished / everyone.num_offered,
    }


def _chunk_s() -> float:
    """The longest chunk of a prompt of the flood, by itself."""
    return load_profile(_PROFILE).step.step_ms([PromptChunk(_CHUNK_TOKENS, _CHUNK_TOKENS)]) / 1e3


def _of_bound(results: Results, system: str) -> Estimate:
    """p99 TTFT in the flood over (unloaded + one chunk + 20 %), seed by seed."""
    loaded, alone = (results.values("p99_ttft_s", arm, system) for arm in (_LANES, _ALONE))
    return mean_estimate([value / (1.2 * base + _chunk_s()) for value, base in zip(loaded, alone, strict=True)])


def _cases(size: Size) -> list[Case]:
    duration_s = 12.0 if size is Size.SMALL else 120.0
    arms = (_ALONE, _LANES, _NO_LANE, _IDLE_LANE, _IDLE_NO_LANE)
    return [Case(arm, partial(_run, arm, system, duration_s), system) for system in _SYSTEMS for arm in arms]


def _findings(results: Results) -> list[str]:
    sentences = [f"One chunk of {_CHUNK_TOKENS} tokens of the flood takes {_chunk_s() * 1e3:.0f} ms."]
    for system in _SYSTEMS:
        times = results.ratio("p99_ttft_s", _NO_LANE, _LANES, system)
        cost = results.ratio("output_tokens_a_s", _LANES, _NO_LANE, system)
        added = results.difference("p99_ttft_s", _LANES, _ALONE, system)
        sentences.append(
            f"{system}: the flood adds {show(added)} s to the urgent lane's p99 TTFT; without the lane it is "
            f"{show(times)} times as long. All output tokens/s with the lane in use: {show(cost)} of those without."
        )
    return sentences


EXPERIMENT = Experiment(
    name="reserved-lane",
    title="A reserved lane under a flood",
    claim=(
        "A lane with a guaranteed share answers as if the system were nearly idle while another lane floods it, and "
        "costs that other lane nothing while it is idle itself."
    ),
    compared=(
        f"Urgent: 1 request/s, prompts of 100 to 1000 tokens, outputs of 20 to 200. Flood: 20 requests/s, prompts of "
        f"1000 to 4000, outputs of 200 to 600, about twice what the system can do. {_PROFILE}, steps of "
        f"{_CHUNK_TOKENS} tokens. The urgent lane is guaranteed {_GUARANTEE:g} of the pages and lends what it does not "
        "use. Figures are of the urgent requests, or of the flood where it is alone; output tokens/s of all."
    ),
    cases=_cases,
    figures=(
        Figure("p50_ttft_s", "p50 TTFT s"),
        Figure("p99_ttft_s", "p99 TTFT s"),
        Figure("p99_worst_gap_s", "p99 worst gap s"),
        Figure("output_tokens_a_s", "output tokens/s", 4),
        Figure("finished_share", "finished"),
    ),
    checks=tuple(
        check
        for system in _SYSTEMS
        for check in (
            Check(
                f"{system}: urgent p99 TTFT in the flood, over (unloaded + one chunk + 20 %)",
                lambda results, system=system: _of_bound(results, system),  # type: ignore[misc]
                at_most=1.0,
                # A dozen urgent requests say too little of a p99 that lies close to its bound.
                sizes=(Size.SMALL, Size.FULL) if system == _SPLIT else (Size.FULL,),
            ),
            Check(
                f"{system}: the flood's output tokens/s with the idle lane, over those without it",
                lambda results, system=system: results.ratio(  # type: ignore[misc]
                    "output_tokens_a_s", _IDLE_LANE, _IDLE_NO_LANE, system
                ),
                at_least=0.95,
            ),
            Check(
                f"{system}: urgent p99 TTFT in the flood, without the lane over with it",
                lambda results, system=system: results.ratio("p99_ttft_s", _NO_LANE, _LANES, system),  # type: ignore[misc]
                at_least=5.0,
            ),
        )
    ),
    findings=_findings,
)
