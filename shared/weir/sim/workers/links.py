"""What pages cross from a prefill to a decode worker's memory: bytes take their time, and transfers stand in line."""

from weir.sim.spec import LinkSpec
from weir.sim.timeline import ns_of_ms


class TransferLink:
    """Books transfers in the order in which they are asked for."""

    def __init__(self, spec: LinkSpec, kv_bytes_per_token: int) -> None:
        self._spec = spec
        self._kv_bytes_per_token = kv_bytes_per_token
        self._free_at_ns: dict[int, int] = {}
        self._shared_free_at_ns = 0
        self.num_bytes = 0
        self.busy_ns = 0

    def transfer(self, now_ns: int, sender: int, receiver: int, num_tokens: int) -> int:
        """When the last byte has arrived."""
        num_bytes = num_tokens * self._kv_bytes_per_token
        duration_ns = ns_of_ms(num_bytes / self._spec.gbytes_per_s / 1e6)
        if self._spec.is_shared:
            start_ns = max(now_ns, self._shared_free_at_ns)
            self._shared_free_at_ns = start_ns + duration_ns
        else:
            ends = (sender, receiver)
            start_ns = max(now_ns, *(self._free_at_ns.get(end, 0) for end in ends))
            self._free_at_ns.update(dict.fromkeys(ends, start_ns + duration_ns))
        self.num_bytes += num_bytes
        self.busy_ns += duration_ns
        return start_ns + duration_ns + ns_of_ms(self._spec.latency_ms)
