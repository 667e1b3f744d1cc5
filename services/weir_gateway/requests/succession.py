"""What a request with a key has to do with the gateways before and after its own."""

from dataclasses import dataclass

from weir.bus.messages import Placement
from weir.kv.geometry import num_pages_for
from weir_gateway.requests.validation import CheckedRequest


@dataclass(frozen=True, slots=True)
class Succession:
    """`first_dispatch`: above all that earlier gateways may have used. `keep_ms`: how long workers keep the sequence
    after this gateway has gone, for the next one; 0: not at all."""

    first_dispatch: int = 1
    keep_ms: int = 0

    @property
    def has_predecessor(self) -> bool:
        """Whether a gateway that died had it: its sequence may live."""
        return self.first_dispatch > 1


def claimed_placement(checked: CheckedRequest, dispatch: int, worker_id: str) -> Placement:
    """Of a sequence that runs at a worker, whoever placed it there; the address follows."""
    num_pages = num_pages_for(len(checked.prompt_token_ids) + checked.stop_rules.max_tokens)
    return Placement(dispatch, worker_id, "", worker_id, "", num_pages, reason="claimed")
