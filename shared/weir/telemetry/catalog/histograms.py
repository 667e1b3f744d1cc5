"""Histograms that processes have, and their edges.

Those of times have vLLM's edges among their own, so that what vLLM's dashboards ask for is made of the same counts, and
finer ones below, where a healthy request is. Seconds; tokens; sequences.
"""

from dataclasses import dataclass

# As in vLLM 0.32, vllm/v1/metrics/buckets.py.
VLLM_TTFT_EDGES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                   40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
VLLM_ITL_EDGES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                  80.0)  # fmt: skip
VLLM_E2E_EDGES = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
                  960.0, 1920.0, 7680.0)  # fmt: skip
VLLM_ITERATION_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
VLLM_PARAMS_N_EDGES = (1, 2, 5, 10, 20)

_FINE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)


def _merged(*groups: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sorted({edge for group in groups for edge in group}))


TTFT_EDGES = _merged(VLLM_TTFT_EDGES, (0.0005, 0.0025, 0.15))
ITL_EDGES = _merged(VLLM_ITL_EDGES, (0.0005, 0.001, 0.0025, 0.005, 0.015))
STAGE_EDGES = _merged(VLLM_E2E_EDGES, _FINE_S)
CALL_EDGES = (0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
STEP_EDGES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
SEQUENCES_EDGES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)


def token_edges(max_tokens: int) -> tuple[float, ...]:
    """1, 2, 5, 10 … up to `max_tokens`, as vLLM has them for lengths."""
    edges: list[float] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > max_tokens and edges:
                return tuple(edges)
            edges.append(mantissa * power)
        power *= 10


@dataclass(frozen=True, slots=True)
class HistogramEntry:
    """How one histogram is exported."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


TTFT = HistogramEntry(
    "weir_time_to_first_token_seconds",
    "From a request's arrival at the gateway to its first token there.",
    ("model", "lane"),
)
ITL = HistogramEntry(
    "weir_inter_token_latency_seconds",
    "Between two frames with tokens of one answer, at the gateway.",
    ("model", "lane"),
)
TPOT = HistogramEntry(
    "weir_time_per_output_token_seconds",
    "Of one finished answer: from its first to its last token, by the tokens after the first.",
    ("model", "lane"),
)
E2E = HistogramEntry(
    "weir_request_seconds", "From a finished request's arrival at the gateway to its last token.", ("model", "lane")
)
STAGE = HistogramEntry(
    "weir_stage_seconds",
    "Parts of a request's life at the gateway: queue, start, prefill, decode; hand_off is the beginning of decode.",
    ("stage", "model", "lane"),
)
PROMPT_TOKENS = HistogramEntry("weir_request_prompt_tokens", "Tokens of finished requests' prompts.", ("model", "lane"))
OUTPUT_TOKENS = HistogramEntry("weir_request_output_tokens", "Tokens of finished requests' answers.", ("model", "lane"))
HAND_OFF = HistogramEntry(
    "weir_hand_off_seconds", "Calls by which prefill workers commit hand-offs, as long as they took."
)
MIGRATION_PAUSE = HistogramEntry(
    "weir_migration_pause_seconds",
    "Of a request that went on at another host: from its last token here to its first token there, at the gateway.",
)
STEP_SEQUENCES = HistogramEntry("weir_step_sequences", "Sequences of one forward pass: the batch's size.")
STEP_TOKENS = HistogramEntry("weir_step_tokens", "Tokens of one forward pass.")
STEP_SECONDS = HistogramEntry(
    "weir_step_seconds", "From a forward pass's decision to its record, by its sequences.", ("sequences",)
)

HISTOGRAMS = (
    TTFT,
    ITL,
    TPOT,
    E2E,
    STAGE,
    PROMPT_TOKENS,
    OUTPUT_TOKENS,
    HAND_OFF,
    MIGRATION_PAUSE,
    STEP_SEQUENCES,
    STEP_TOKENS,
    STEP_SECONDS,
)
