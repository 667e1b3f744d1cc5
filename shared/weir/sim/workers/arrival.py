"""What comes to a simulated worker: a prompt, or a sequence that another worker hands over after its first token."""

from typing import NamedTuple

from weir.engine.messages import Arrival
from weir.kv.geometry import PAGE_TOKENS
from weir.sim.memory.page_memory import SimPageMemory
from weir.sim.request_state import TOKEN, SimRequestState


class SimArrival(NamedTuple):
    """As `weir.engine.messages.Arrival`, without parameters: only the real batchers ask for them."""

    state: SimRequestState
    slot: int | None = None
    """None: a prompt."""
    page_ids: tuple[int, ...] = ()
    """A prompt's are those of its cached prefix."""

    def for_batcher(self, memory: SimPageMemory) -> Arrival:
        """`memory`: of the worker that takes it."""
        state, slot, page_ids = self
        params = state.params()
        if slot is None:
            num_cached_tokens = len(page_ids) * PAGE_TOKENS
            return Arrival(
                params, block_table=page_ids, num_computed_tokens=num_cached_tokens, num_shared_pages=len(page_ids)
            )
        record = memory.records[slot]
        record.begin(params)
        return Arrival(
            params,
            slot=slot,
            log=record,
            output_token_ids=(TOKEN,),
            block_table=page_ids,
            num_computed_tokens=state.request.num_prompt_tokens,
        )
