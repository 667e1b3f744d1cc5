"""What a gateway counts of its requests, by model and lane: updated for each token, read by whoever exports it."""

from collections import Counter

from weir.telemetry.catalog.histograms import (
    E2E,
    ITL,
    ITL_EDGES,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    STAGE,
    STAGE_EDGES,
    TPOT,
    TTFT,
    TTFT_EDGES,
    VLLM_PARAMS_N_EDGES,
    token_edges,
)
from weir.telemetry.described import HistogramFigure
from weir.telemetry.histogram import Histogram
from weir.telemetry.labels import StickyLabels

_MAX_LANES = 64
STAGES = ("queue", "start", "prefill", "hand_off", "decode")


class LaneFigures:
    """Of one model's requests in one lane. Public to count in; times in seconds."""

    __slots__ = (
        "computed_prompt_tokens",
        "e2e",
        "ends",
        "inference",
        "itl",
        "longest_output_tokens",
        "max_tokens",
        "num_cached_tokens",
        "num_choices",
        "num_output_tokens",
        "num_prompt_tokens",
        "output_tokens",
        "prompt_tokens",
        "stages",
        "tpot",
        "ttft",
    )

    def __init__(self, max_context_tokens: int) -> None:
        lengths = token_edges(max_context_tokens)
        self.ttft = Histogram(TTFT_EDGES)
        self.itl = Histogram(ITL_EDGES)
        self.tpot = Histogram(ITL_EDGES)
        self.e2e = Histogram(STAGE_EDGES)
        self.stages = {stage: Histogram(STAGE_EDGES) for stage in STAGES}
        self.inference = Histogram(STAGE_EDGES)
        """Start, prefill and decode together."""
        self.prompt_tokens = Histogram(lengths)
        self.computed_prompt_tokens = Histogram(lengths)
        """Those that were not in the prefix cache."""
        self.output_tokens = Histogram(lengths)
        self.longest_output_tokens = Histogram(lengths)
        """Of the answers to one prompt, the longest."""
        self.max_tokens = Histogram(lengths)
        self.num_choices = Histogram(VLLM_PARAMS_N_EDGES)
        self.num_prompt_tokens = 0
        """Of prompts that have a first token, each once however many answers it has, and how many of these tokens were
        cached."""
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        """As they come."""
        self.ends: Counter[str] = Counter()
        """By vLLM's words for how requests end: stop, length, abort, error."""

    def histograms(self) -> list[tuple[str, tuple[tuple[str, str], ...], Histogram]]:
        """By the names that they are exported by, with their labels."""
        plain = (
            (TTFT, self.ttft),
            (ITL, self.itl),
            (TPOT, self.tpot),
            (E2E, self.e2e),
            (PROMPT_TOKENS, self.prompt_tokens),
            (OUTPUT_TOKENS, self.output_tokens),
        )
        stages = [(STAGE.name, (("stage", stage),), histogram) for stage, histogram in self.stages.items()]
        return [*((entry.name, (), histogram) for entry, histogram in plain), *stages]


class RequestFigures:
    """Of all requests. Lanes and models are those of the configuration, and bounded whatever that says."""

    def __init__(self) -> None:
        self._lanes = StickyLabels(_MAX_LANES)
        self._by_lane: dict[tuple[str, str], LaneFigures] = {}
        self._max_context_tokens: dict[str, int] = {}
        """By model, as it was first: what it was made with decides the edges of lengths."""

    @property
    def num_dropped(self) -> int:
        """Requests that were counted under another lane than their own."""
        return self._lanes.num_dropped

    def of(self, model: str, lane: str, max_context_tokens: int) -> LaneFigures:
        """To be asked once a request."""
        key = (model, self._lanes.of(lane))
        found = self._by_lane.get(key)
        if found is None:
            found = self._by_lane[key] = self._make(model, max_context_tokens)
        return found

    def of_model(self, model: str, max_context_tokens: int) -> list[LaneFigures]:
        """In all lanes that it had a request in, and in one that has none; all with the same edges."""
        lanes = [figures for (name, _), figures in self._by_lane.items() if name == model]
        return [*lanes, self._make(model, max_context_tokens)]

    def _make(self, model: str, max_context_tokens: int) -> LaneFigures:
        return LaneFigures(self._max_context_tokens.setdefault(model, max_context_tokens))

    def histograms(self) -> list[HistogramFigure]:
        """Those that are empty too: nothing was seen, which is known."""
        return [
            HistogramFigure(name, histogram.value(), (*labels, ("model", model), ("lane", lane)))
            for (model, lane), figures in self._by_lane.items()
            for name, labels, histogram in figures.histograms()
        ]

    def metrics(self) -> dict[str, float]:
        """Names such as `lane_output_tokens_total{lane="batch"}`."""
        counts: Counter[str] = Counter()
        for (_, lane), figures in self._by_lane.items():
            counts[f'lane_prompt_tokens_total{{lane="{lane}"}}'] += figures.num_prompt_tokens
            counts[f'lane_output_tokens_total{{lane="{lane}"}}'] += figures.num_output_tokens
        return {name: float(count) for name, count in counts.items()}
