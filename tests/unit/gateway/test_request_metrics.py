"""Requests and tokens are counted in total and by tenant."""

from weir.core.errors import NotFound
from weir.core.life import Phase
from weir_gateway.requests.request_metrics import RequestMetrics


def test_counts_of_tenants_are_bounded_however_many_come() -> None:
    counts = RequestMetrics(max_tenants=2)
    for tenant in ("a", "b", "c", "d", "a"):
        counts.count_phase(tenant, Phase.FINISHED)
    found = counts.metrics()
    assert {name: count for name, count in found.items() if name.startswith("tenant_")} == {
        'tenant_finished_total{tenant="a"}': 2.0,
        'tenant_finished_total{tenant="b"}': 1.0,
        'tenant_finished_total{tenant="other"}': 2.0,
    }
    assert found["finished_total"] == 5


def test_a_request_runs_from_its_acceptance_to_any_of_its_ends() -> None:
    counts = RequestMetrics()
    ends = (Phase.FINISHED, Phase.CANCELLED, Phase.FAILED, Phase.REFUSED)
    for end in ends:
        counts.count_phase("a", Phase.RECEIVED)
        counts.count_phase("a", Phase.QUEUED)
        assert counts.num_running == 1
        counts.count_phase("a", end)
        assert counts.num_running == 0
    assert all(counts.metrics()[f"{end.value}_total"] == 1 for end in ends)


def test_a_rejection_is_counted_by_its_error_and_is_no_acceptance() -> None:
    counts = RequestMetrics()
    counts.count_rejection(NotFound("model", "model: 'x' is not served here"))
    assert counts.metrics()["rejected_notfound_total"] == counts.metrics()["rejected_total"] == 1
    assert counts.num_running == counts.metrics()["accepted_total"] == 0
