"""Runs a step's plan: the only part of a worker that touches tensors."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from weir.core.logprobs import TokenLogprobs
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.architecture import ModelConfig
from weir.model.sampler import compile_kernels, rows_to_score, sample_step, score_rows
from weir.model.torch.batch import ScoredChunk, build_batch
from weir.model.torch.decoder import Decoder
from weir.model.torch.paged_kv import PagedKv
from weir.model.torch.weights import Weights

_WARM_UP_PREFILL_TOKENS = (128, 16)
_WARM_UP_DECODE_ROWS = (1, 32)


class TorchRunner:
    """Implements `weir.engine.plan.ModelRunner` over pages [num_pages, page_bytes] uint8, which stay where they are."""

    def __init__(self, config: ModelConfig, weights: Weights, pages: npt.NDArray[np.uint8]) -> None:
        self._config = config
        self._decoder = Decoder(config, weights)
        self._kv = PagedKv(config.page_geometry, pages)

    def run(self, plan: StepPlan) -> StepResult:
        """Raises InternalError on a plan that makes no sense, or if the logits are not numbers."""
        return self._run(plan, self._kv)

    def warm_up(self) -> None:
        """Prefills and decodes of several sizes in memory of its own, so that no page of the arena is touched."""
        compile_kernels()
        longest = min(max(_WARM_UP_PREFILL_TOKENS), self._config.max_context_tokens - 1)
        num_pages = num_pages_for(longest + 1)
        scratch = PagedKv(
            self._config.page_geometry, np.zeros((num_pages, self._config.page_geometry.page_bytes), dtype=np.uint8)
        )
        table = tuple(range(num_pages))
        sampled = SampleSpec(SamplingParams(temperature=1.0, top_p=0.9), output_index=0)
        for num_tokens in _WARM_UP_PREFILL_TOKENS:
            ids = (0,) * min(num_tokens, longest)
            self._run(StepPlan(0, (ChunkPlan(0, 0, ids, table, sampled),)), scratch)
        for num_rows in _WARM_UP_DECODE_ROWS:
            start = min(PAGE_TOKENS * 4, longest)
            chunks = tuple(ChunkPlan(slot, start, (0,), table, sampled) for slot in range(num_rows))
            self._run(StepPlan(0, chunks), scratch)

    def _run(self, plan: StepPlan, kv: PagedKv) -> StepResult:
        if not plan.chunks:
            return StepResult({})
        with torch.inference_mode():
            batch = build_batch(plan, kv, self._config.vocab_size, self._config.max_context_tokens)
            hidden = self._decoder.forward(batch, kv)
            scores = {scored.slot: self._score(hidden, scored) for scored in batch.scored_chunks}
            if not batch.sampled_rows:
                return StepResult({}, prompt_logprobs=scores)
            logits = self._decoder.logits(hidden[[sampled.row for sampled in batch.sampled_rows]]).numpy()
        slots, specs = zip(*((sampled.slot, sampled.spec) for sampled in batch.sampled_rows), strict=True)
        return replace(sample_step(logits, slots, specs), prompt_logprobs=scores)

    def _score(self, hidden: torch.Tensor, scored: ScoredChunk) -> tuple[TokenLogprobs, ...]:
        """In slices: the logits of a whole prompt would be gigabytes."""
        spec = scored.spec
        return tuple(
            logprobs
            for rows in rows_to_score(spec)
            for logprobs in score_rows(
                self._decoder.logits(hidden[scored.first_row + rows.start : scored.first_row + rows.stop]).numpy(),
                spec.next_token_ids[rows],
                spec.num_top,
            )
        )
