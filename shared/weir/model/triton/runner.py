"""Runs a step's plan on a GPU."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.kv.geometry import num_pages_for
from weir.model.architecture import ModelConfig
from weir.model.rows import SampledRow, ScoredRows, check_logits
from weir.model.torch.weights import Weights
from weir.model.triton.batch import (
    BatchMaker,
    DeviceBatch,
    SampleIndex,
    TritonLimits,
    device_batch,
    is_sampled_on_device,
)
from weir.model.triton.decoder import TritonDecoder
from weir.model.triton.graphs import Capture, DecodeGraphs, cuda_graph_capture, graph_shapes
from weir.model.triton.memory import DevicePages, StepUpload
from weir.ops.gpu.sampling import NOT_A_NUMBER, sample, sampling_scratch

_log = logging.getLogger(__name__)
_WARM_UP_TOKENS = 40


class TritonRunner:
    """Implements `weir.model.load.Runner` over pages on a device, as `page_tensor` makes them.

    Greedy tokens and those by temperature alone are sampled there; the logits of others come to the host.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        pages: torch.Tensor,
        limits: TritonLimits,
        wait_for_device: Callable[[], None] | None = None,
    ) -> None:
        """`weights` and `pages` are on the device, of one type. Raises ValueError for pages of another geometry.

        `wait_for_device`: until everything that this thread has launched is done; by default the current stream.
        """
        self._config = config
        self._weights = weights
        self._limits = limits
        self._page_tensor = pages
        self.pages = DevicePages(pages)
        """For swapping, in the thread that runs steps."""
        self._batches = BatchMaker(len(pages), config.vocab_size, limits)
        self._decoder = TritonDecoder(config, weights, pages, limits)
        self._upload = StepUpload(limits.upload_bytes, pages.device)
        self._scratch = sampling_scratch(limits.max_sequences, config.vocab_size, pages.device)
        self._token_ids = torch.empty(limits.max_sequences, dtype=torch.int32, device=pages.device)
        self._wait_for_device = wait_for_device or partial(_wait_for_stream, pages.device)
        self._graphs: DecodeGraphs | None = None

    def warm_up(self) -> None:
        """Compiles every kernel and, on a GPU, captures the graphs of decode steps.

        Pages of the arena may be others' already: none is written, and only page 0 is read, whatever is in it.
        """
        _compile_host_sampling()
        length = min(_WARM_UP_TOKENS, self._limits.max_rows, self._limits.max_context_tokens - 1)
        table = tuple(range(num_pages_for(length + 1)))
        scratch = self._page_tensor.new_zeros((len(table), *self._page_tensor.shape[1:]))
        limits = replace(self._limits, max_rows=length, max_sequences=1)
        runner = TritonRunner(self._config, self._weights, scratch, limits)
        greedy = SamplingParams(temperature=0.0)
        runner.run(StepPlan(0, (ChunkPlan(0, 0, (0,) * length, table, SampleSpec(greedy, 0)),)))
        runner.run(StepPlan(0, (ChunkPlan(0, length, (0,), table, SampleSpec(greedy, 1)),)))
        if scratch.is_cuda:
            self.capture_decodes()

    def capture_decodes(self, capture: Capture | None = None) -> None:
        """From here on steps of decodes alone are replayed, by default as CUDA graphs. Reads page 0 and writes none."""
        capture = capture or cuda_graph_capture()
        graphs = DecodeGraphs(graph_shapes(self._limits), self._upload, self._decode_step, capture)
        with torch.inference_mode():
            graphs.capture_all()
        self._graphs = graphs

    def run(self, plan: StepPlan) -> StepResult:
        """Returns, or raises, once the device has written the pages: other processes may get them right after.

        Raises InternalError on a plan that makes no sense, or if the logits are not numbers.
        """
        if not plan.chunks:
            return StepResult({})
        try:
            with torch.inference_mode():
                return self._run(plan)
        finally:
            self._wait_for_device()

    def _run(self, plan: StepPlan) -> StepResult:
        batch = self._batches.make(plan)
        token_ids = self._graphs.try_run(batch) if self._graphs is not None else None
        if token_ids is not None:
            return StepResult(_by_slot(token_ids.tolist(), batch.sampled))
        index = device_batch(batch, self._upload, self._decoder.queries_per_tile)
        self._decoder.forward(index)
        scores = {scored.slot: self._prompt_logprobs(scored, index.token_ids.device) for scored in batch.scored}
        if index.sample is None:
            return StepResult({}, prompt_logprobs=scores)
        result = self._sample_rows(self._decoder.logits(index.sample.rows), batch.sampled, index.sample)
        return replace(result, prompt_logprobs=scores)

    def _decode_step(self, index: DeviceBatch) -> torch.Tensor:
        """The sampled tokens, int32 [rows]: what a graph is made of."""
        assert index.sample is not None, "decodes are sampled"
        self._decoder.forward(index)
        return self._sample(self._decoder.logits(index.sample.rows), index.sample)

    def _sample(self, logits: torch.Tensor, index: SampleIndex) -> torch.Tensor:
        token_ids = self._token_ids[: len(logits)]
        sample(logits, index.temperatures, index.uniforms, token_ids, self._scratch)
        return token_ids

    def _sample_rows(self, logits: torch.Tensor, rows: Sequence[SampledRow], index: SampleIndex) -> StepResult:
        by_slot = _by_slot(self._sample(logits, index).tolist(), rows)
        on_host = [number for number, row in enumerate(rows) if not is_sampled_on_device(row.spec)]
        if not on_host:
            return StepResult(by_slot)
        # here and not above: it needs numba, which a machine that samples greedily or by temperature may lack
        from weir.model.sampler import sample_step, scan_of  # noqa: PLC0415

        host_logits = np.ascontiguousarray(logits[on_host].cpu().numpy())
        result = sample_step(scan_of(host_logits), [rows[number] for number in on_host])
        return replace(result, token_ids=by_slot | dict(result.token_ids))

    def _prompt_logprobs(self, scored: ScoredRows, device: torch.device) -> tuple[TokenLogprobs, ...]:
        from weir.model.sampler import Logits, prompt_logprobs  # noqa: PLC0415 - as for `_sample_rows`

        def logits_of(rows: range) -> Logits:
            logits = self._decoder.logits(torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device))
            return logits.cpu().numpy()

        return prompt_logprobs(scored, logits_of)


def _compile_host_sampling() -> None:
    """Of sampling other than greedy or by temperature. It needs numba, which a machine that does without may lack."""
    try:
        from weir.model.sampler import compile_kernels  # noqa: PLC0415
    except ImportError as error:
        _log.warning("only greedy sampling and sampling by temperature will work, the rest needs numba: %s", error)
        return
    compile_kernels()


def _wait_for_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _by_slot(token_ids: Sequence[int], rows: Sequence[SampledRow]) -> dict[int, int]:
    """Token ids behind those of `rows` fill a batch up."""
    check_logits([number for number, _ in enumerate(rows) if token_ids[number] == NOT_A_NUMBER], len(rows))
    return {row.slot: token_id for row, token_id in zip(rows, token_ids, strict=False)}
