"""Runs a step's plan on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult, TokenHistory
from weir.kv.geometry import num_pages_for
from weir.model.architecture import ModelConfig
from weir.model.rows import ScoredRows
from weir.model.torch.weights import Weights
from weir.model.triton.batch import (
    MAX_PADDED_PROMPTS,
    BatchMaker,
    DeviceBatch,
    HostBatch,
    MixedSize,
    TritonLimits,
    device_batch,
    padded_decodes,
    padded_mixed,
)
from weir.model.triton.decoder import TritonDecoder
from weir.model.triton.graphs import Capture, StepGraphs, cuda_graph_capture, decode_sizes, mixed_sizes
from weir.model.triton.memory import DevicePages, StepUpload
from weir.model.triton.sampled_before import SampledBefore
from weir.model.triton.sampling import DeviceSampler, PendingSamples

_WARM_UP_TOKENS = 40


@dataclass(frozen=True, slots=True)
class _Graphs:
    """`decodes` end with logits [rows, vocabulary], `mixed` with the forward pass."""

    decodes: StepGraphs[torch.Tensor]
    mixed: StepGraphs[None]


class TritonRunner:
    """Implements `weir.model.load.Runner` and `weir.engine.plan.LaunchingRunner` over pages on a device, as
    `page_tensor` makes them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        pages: torch.Tensor,
        limits: TritonLimits,
        mark_stream: Callable[[], Callable[[], None]] | None = None,
        *,
        is_exact: bool = False,
    ) -> None:
        """`weights` and `pages` are on the device, of one type. Raises ValueError for pages of another geometry.

        `mark_stream`: returns what waits until all is done that this thread has launched so far; by default on the
        current stream. `is_exact`: a row's logits are the same to the bit in every batch.
        """
        self._config = config
        self._weights = weights
        self._is_exact = is_exact
        self._limits = limits
        self._page_tensor = pages
        self.pages = DevicePages(pages)
        """For swapping, in the thread that runs steps."""
        self._batches = BatchMaker(len(pages), config.vocab_size, limits)
        self._decoder = TritonDecoder(config, weights, pages, limits, is_exact=is_exact)
        self._upload = StepUpload(limits.upload_bytes, pages.device)
        self._sampler = DeviceSampler(limits, config.vocab_size, pages.device)
        self._sampled_before = SampledBefore(limits.max_sequences, pages.device)
        self._mark_stream = mark_stream or partial(_mark_current_stream, pages.device)
        self._graphs: _Graphs | None = None

    def warm_up(self) -> None:
        """Compiles every kernel and, on a GPU, captures the graphs of steps.

        Pages of the arena may be others' already: none is read or written.
        """
        length = min(_WARM_UP_TOKENS, self._limits.max_rows, self._limits.max_context_tokens - 1)
        table = tuple(range(num_pages_for(length + 1)))
        scratch = self._page_tensor.new_zeros((len(table), *self._page_tensor.shape[1:]))
        limits = replace(self._limits, max_rows=length, max_sequences=1)
        runner = TritonRunner(self._config, self._weights, scratch, limits, is_exact=self._is_exact)
        greedy = SamplingParams(temperature=0.0)
        runner.run(StepPlan(0, (ChunkPlan(0, 0, (0,) * length, table, SampleSpec(greedy, 0)),)))
        everything = SamplingParams(top_k=8, top_p=0.5, min_p=0.1, presence_penalty=1.0, logprobs=1)
        spec = SampleSpec(everything, 1, history=TokenHistory(np.zeros(length, np.int32), length))
        runner.run(StepPlan(0, (ChunkPlan(0, length, (0,), table, spec),)))
        if scratch.is_cuda:
            self.capture_graphs()

    def capture_graphs(self, capture: Capture | None = None) -> None:
        """From here on steps of few rows are replayed, by default as CUDA graphs. Reads and writes no page."""
        capture = capture or cuda_graph_capture()
        max_rows = self._limits.max_rows
        sizes = decode_sizes(min(self._limits.max_sequences, max_rows))
        decodes = StepGraphs(sizes, self._padded_decodes, self._decode_step, capture)
        mixed = StepGraphs(mixed_sizes(max_rows), self._padded_mixed, self._decoder.forward, capture)
        with torch.inference_mode():
            mixed.capture_all()
            decodes.capture_all()
        self._graphs = _Graphs(decodes, mixed)

    def run(self, plan: StepPlan) -> StepResult:
        """Returns, or raises, once the device has written the pages: other processes may get them right after.

        Raises InternalError on a plan that makes no sense, or if the logits are not numbers.
        """
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Returns while the device computes. What is returned waits, and then returns or raises as `run` does.

        Raises as `run` does too, once nothing runs any more.
        """
        if not plan.chunks:
            return lambda: StepResult({})
        try:
            with torch.inference_mode():
                finish = self._launch(plan)
        except BaseException:
            self._sampled_before.forget()
            self._mark_stream()()
            raise
        wait = self._mark_stream()

        def result() -> StepResult:
            wait()
            return finish()

        return result

    def _launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """What is returned is to be called once the device has done it."""
        batch = self._batches.make(plan)
        if self._graphs is not None and not batch.prefills:
            replayed = self._graphs.decodes.try_run(batch)
            if replayed is not None:
                return self._sampled(replayed.result[: len(batch.decodes)], batch).result
        index = self._forward(batch)
        scores = {scored.slot: self._prompt_logprobs(scored, index.token_ids.device) for scored in batch.scored}
        if index.sampled_rows is None:
            self._sampled_before.forget()
            return lambda: StepResult({}, prompt_logprobs=scores)
        samples = self._sampled(self._decoder.logits(index.sampled_rows), batch)
        return lambda: replace(samples.result(), prompt_logprobs=scores)

    def _forward(self, batch: HostBatch) -> DeviceBatch:
        """The decoder then has the last hidden states of these rows."""
        if self._graphs is not None and 0 < len(batch.prefills) <= MAX_PADDED_PROMPTS:
            replayed = self._graphs.mixed.try_run(batch)
            if replayed is not None:
                return replayed.index
        index = device_batch(batch, self._upload, self._decoder.queries_per_tile, self._decoder.decode_tiles)
        self._sampled_before.fill_in(batch.decodes, index.token_ids)
        self._decoder.forward(index)
        return index

    def _sampled(self, logits: torch.Tensor, batch: HostBatch) -> PendingSamples:
        samples = self._sampler.launch(logits, batch.sampled)
        self._sampled_before.note(samples.rows, samples.token_ids)
        return samples

    def _padded_decodes(self, batch: HostBatch, num_rows: int) -> DeviceBatch:
        decoder = self._decoder
        index = padded_decodes(batch, num_rows, self._upload, decoder.decode_tiles, decoder.most_work(num_rows))
        self._sampled_before.fill_in(batch.decodes, index.token_ids)
        return index

    def _padded_mixed(self, batch: HostBatch, num_rows: int) -> DeviceBatch:
        decoder, size = self._decoder, MixedSize.of(num_rows, self._limits)
        most = decoder.most_work(size.max_decodes)
        index = padded_mixed(batch, size, self._upload, decoder.queries_per_tile, decoder.decode_tiles, most)
        self._sampled_before.fill_in(batch.decodes, index.token_ids)
        return index

    def _decode_step(self, index: DeviceBatch) -> torch.Tensor:
        """The logits, fp32 [rows, vocabulary]: what a graph is made of."""
        assert index.sampled_rows is not None, "decodes are sampled"
        self._decoder.forward(index)
        return self._decoder.logits(index.sampled_rows)

    def _prompt_logprobs(self, scored: ScoredRows, device: torch.device) -> tuple[TokenLogprobs, ...]:
        def logits_of(rows: range) -> torch.Tensor:
            return self._decoder.logits(torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device))

        return self._sampler.prompt_logprobs(scored, logits_of)


def _mark_current_stream(device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return lambda: None  # what is launched is done
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
