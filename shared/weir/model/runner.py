"""Runs a step's plan: the only part of a worker that touches tensors."""

import numpy as np
import numpy.typing as npt
import torch

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.config import ModelConfig
from weir.model.decoder import Decoder
from weir.model.paged_kv import PagedKv
from weir.model.sampler import sample_rows
from weir.model.step_batch import build_batch
from weir.model.weights import Weights

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
            if not batch.sampled_rows:
                return StepResult({})
            logits = self._decoder.logits(hidden[[sampled.row for sampled in batch.sampled_rows]])
            token_ids = sample_rows(logits, [sampled.spec for sampled in batch.sampled_rows])
        slots = (sampled.slot for sampled in batch.sampled_rows)
        return StepResult(dict(zip(slots, token_ids, strict=True)))
