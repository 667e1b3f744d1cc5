"""Counters of requests and their tokens, of all and by tenant."""

from collections import Counter

from weir.core.errors import WeirError
from weir.core.life import Phase
from weir.telemetry.labels import StickyLabels

_MAX_TENANTS = 256
_PHASE_METRICS = {
    Phase.RECEIVED: "accepted_total",
    Phase.FINISHED: "finished_total",
    Phase.CANCELLED: "cancelled_total",
    Phase.FAILED: "failed_total",
    Phase.REFUSED: "refused_total",
}
_TENANT_PHASES = (Phase.RECEIVED, Phase.FINISHED, Phase.REFUSED)


class RequestMetrics:
    """Counters of requests and tokens, of all and by tenant.

    Bounded however often tenants come and go. Their names are those of the limits file, never a client's choice.
    """

    def __init__(self, *, max_tenants: int = _MAX_TENANTS) -> None:
        self._tenants = StickyLabels(max_tenants)
        self._counts: Counter[str] = Counter(
            dict.fromkeys(
                (
                    *_PHASE_METRICS.values(),
                    "rejected_total",
                    "prompt_tokens_total",
                    "output_tokens_total",
                    "reasoning_tokens_total",
                    "tool_calls_total",
                ),
                0,
            )
        )

    def count_rejection(self, error: WeirError) -> None:
        """For a request that never was accepted."""
        self._counts.update(("rejected_total", f"rejected_{type(error).__name__.lower()}_total"))

    def count_phase(self, tenant: str, phase: Phase) -> None:
        if phase in _PHASE_METRICS:
            self._counts[_PHASE_METRICS[phase]] += 1
        if phase in _TENANT_PHASES:
            self._add_of_tenant(tenant, _PHASE_METRICS[phase], 1)

    def count_prompt_tokens(self, tenant: str, num_tokens: int) -> None:
        self._counts["prompt_tokens_total"] += num_tokens
        self._add_of_tenant(tenant, "prompt_tokens_total", num_tokens)

    def count_output_tokens(self, tenant: str, num_tokens: int) -> None:
        self._counts["output_tokens_total"] += num_tokens
        self._add_of_tenant(tenant, "output_tokens_total", num_tokens)

    def count_reasoning_tokens(self, num_tokens: int) -> None:
        """They are output tokens too."""
        self._counts["reasoning_tokens_total"] += num_tokens

    def count_tool_calls(self, num_calls: int) -> None:
        """That are complete."""
        self._counts["tool_calls_total"] += num_calls

    @property
    def num_labels_dropped(self) -> int:
        return self._tenants.num_dropped

    @property
    def num_running(self) -> int:
        """Accepted requests that have not ended."""
        terminal = sum(self._counts[name] for phase, name in _PHASE_METRICS.items() if phase.is_terminal)
        return self._counts["accepted_total"] - terminal

    def metrics(self) -> dict[str, float]:
        """Those of a tenant by names such as `tenant_finished_total{tenant="acme"}`."""
        return {name: float(count) for name, count in self._counts.items()}

    def _add_of_tenant(self, tenant: str, name: str, amount: int) -> None:
        self._counts[f'tenant_{name}{{tenant="{self._tenants.of(tenant)}"}}'] += amount
