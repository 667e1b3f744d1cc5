"""Runs a step's plan on a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from weir.core.errors import InternalError
from weir.core.logprobs import TokenLogprobs
from weir.engine.plan import StepPlan, StepResult
from weir.model.architecture import ModelConfig
from weir.model.torch.weights import Weights
from weir.model.triton.batch import (
    DeviceBatch,
    DeviceSampledRow,
    DeviceScoredRows,
    SampleIndex,
    TritonLimits,
    device_batch,
    host_batch,
)
from weir.model.triton.decoder import TritonDecoder
from weir.model.triton.graphs import Capture, DecodeGraphs, cuda_graph_capture, graph_shapes
from weir.model.triton.upload import StepUpload
from weir.ops.sampling.launch import sample, sampling_scratch
from weir.ops.sampling.reference import NOT_A_NUMBER


class TritonRunner:
    """Implements `weir.engine.plan.ModelRunner` over pages on a device, as `triton_decoder.empty_pages` makes them.

    Greedy draws and draws by temperature alone are made there; the logits of others come to the host.
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
        self._limits = limits
        self._num_pages = len(pages)
        self._decoder = TritonDecoder(config, weights, pages, limits)
        self._upload = StepUpload(limits.upload_bytes, pages.device)
        self._scratch = sampling_scratch(limits.max_sequences, config.vocab_size, pages.device)
        self._token_ids = torch.empty(limits.max_sequences, dtype=torch.int32, device=pages.device)
        self._wait_for_device = wait_for_device or partial(_wait_for_stream, pages.device)
        self._graphs: DecodeGraphs | None = None

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
        batch = host_batch(plan, self._num_pages, self._config.vocab_size, self._limits)
        drawn = self._graphs.try_run(batch) if self._graphs is not None else None
        if drawn is not None:
            return StepResult(_checked(drawn.tolist(), batch.sampled))
        index = device_batch(batch, self._upload, self._decoder.queries_per_tile)
        self._decoder.forward(index)
        scores = {scored.slot: self._score(scored, index) for scored in batch.scored}
        if index.sample is None:
            return StepResult({}, prompt_logprobs=scores)
        result = self._draw(self._decoder.logits(index.sample.rows), batch.sampled, index.sample)
        return replace(result, prompt_logprobs=scores)

    def _decode_step(self, index: DeviceBatch) -> torch.Tensor:
        """The drawn tokens, int32 [rows]: what a graph is made of."""
        assert index.sample is not None, "decodes draw"
        self._decoder.forward(index)
        return self._sample(self._decoder.logits(index.sample.rows), index.sample)

    def _sample(self, logits: torch.Tensor, index: SampleIndex) -> torch.Tensor:
        token_ids = self._token_ids[: len(logits)]
        sample(logits, index.temperatures, index.uniforms, token_ids, self._scratch)
        return token_ids

    def _draw(self, logits: torch.Tensor, sampled: Sequence[DeviceSampledRow], index: SampleIndex) -> StepResult:
        by_slot = _checked(self._sample(logits, index).tolist(), sampled)
        places = [place for place, row in enumerate(sampled) if not row.is_sampled_on_device]
        if not places:
            return StepResult(by_slot)
        # here and not above: it needs numba, which a machine that draws greedily or by temperature may lack
        from weir.model.sampler import sample_step  # noqa: PLC0415

        host_logits = np.ascontiguousarray(logits[places].cpu().numpy())
        others = [sampled[place] for place in places]
        on_host = sample_step(host_logits, [row.slot for row in others], [row.spec for row in others])
        return StepResult(by_slot | dict(on_host.token_ids), logprobs=on_host.logprobs)

    def _score(self, scored: DeviceScoredRows, index: DeviceBatch) -> tuple[TokenLogprobs, ...]:
        """In slices: the logits of a whole prompt would be gigabytes."""
        from weir.model.sampler import rows_to_score, score_rows  # noqa: PLC0415 - as for `_draw`

        spec, first = scored.spec, scored.first_row
        device = index.token_ids.device
        return tuple(
            logprobs
            for rows in rows_to_score(spec)
            for logprobs in score_rows(
                self._decoder.logits(
                    torch.arange(first + rows.start, first + rows.stop, dtype=torch.int32, device=device)
                )
                .cpu()
                .numpy(),
                spec.next_token_ids[rows],
                spec.num_top,
            )
        )


def _wait_for_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _checked(drawn: Sequence[int], sampled: Sequence[DeviceSampledRow]) -> dict[int, int]:
    """The tokens by slot. Rows behind those of `sampled` fill a batch up."""
    wrong = [row for row, token_id in enumerate(drawn[: len(sampled)]) if token_id == NOT_A_NUMBER]
    if wrong:
        raise InternalError(
            f"the model computed NaN or infinite logits in {len(wrong)} of {len(sampled)} rows: {wrong[:8]}"
        )
    return {row.slot: token_id for row, token_id in zip(sampled, drawn, strict=False)}
