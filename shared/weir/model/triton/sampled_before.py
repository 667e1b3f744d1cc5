"""The tokens of the step before, on the device: a step that is launched before they are on the host reads them."""

from collections.abc import Sequence

import numpy as np
import torch

from weir.core.errors import InternalError
from weir.engine.plan import SAMPLED_BEFORE
from weir.model.rows import SampledRow
from weir.model.triton.batch import DecodeRows
from weir.model.triton.memory import StepUpload, upload_bytes_of


class SampledBefore:
    """Of the step that was launched last."""

    def __init__(self, max_sequences: int, device: torch.device) -> None:
        self._upload = StepUpload(upload_bytes_of([np.empty(max_sequences, np.int32)]), device)
        self._token_ids = torch.empty(0, dtype=torch.int32, device=device)
        self._place_of: dict[int, int] = {}

    def note(self, rows: Sequence[SampledRow], token_ids: torch.Tensor) -> None:
        """Token i, int32 [rows] in memory that the next step's sampling writes to, is that of `rows[i]`."""
        self._token_ids = token_ids
        self._place_of = {row.slot: place for place, row in enumerate(rows)}

    def forget(self) -> None:
        """The last step has sampled nothing."""
        self._place_of = {}

    def fill_in(self, decodes: DecodeRows, token_ids: torch.Tensor) -> None:
        """Puts them where the step that comes now reads its tokens, `token_ids` int32 [at least decodes].

        Raises InternalError for a slot of which nothing was sampled.
        """
        if not len(decodes) or decodes.token_ids[0] != SAMPLED_BEFORE:
            return
        places = [self._place_of.get(chunk.slot, -1) for chunk in decodes.chunks]
        if min(places) < 0:
            slots = [chunk.slot for chunk, place in zip(decodes.chunks, places, strict=True) if place < 0]
            raise InternalError(f"step plan: slots {slots[:8]} go on from tokens that the step before has not sampled")
        (sources,) = self._upload.send([np.array(places, np.int32)])
        # a row whose logits were no numbers has no token: its step fails, but this one must not read out of bounds
        token_ids[: len(decodes)] = self._token_ids.index_select(0, sources).clamp_(min=0)
