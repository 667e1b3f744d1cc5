"""Runs a step's plan: the only part of a worker that touches tensors."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.architecture import ModelConfig
from weir.model.sampler import Logits, compile_kernels, prompt_logprobs, sample_step, scan_of
from weir.model.torch.batch import build_batch
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
            batch = build_batch(plan, kv, self._config)
            hidden = self._decoder.forward(batch, kv)
            scores = {
                scored.slot: prompt_logprobs(scored, lambda rows: self._logits(hidden[rows.start : rows.stop]))
                for scored in batch.scored
            }
            if not batch.sampled:
                return StepResult({}, prompt_logprobs=scores)
            logits = self._logits(hidden[[row.row for row in batch.sampled]])
        return replace(sample_step(scan_of(logits), batch.sampled), prompt_logprobs=scores)

    def _logits(self, hidden: torch.Tensor) -> Logits:
        return self._decoder.logits(hidden).numpy()
