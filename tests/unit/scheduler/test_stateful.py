"""Anything may happen in any order: counts add up, order and bounds hold, everything ends once, nothing is left."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.unit.scheduler.rig import LANES, make_limits, make_worker
from tests.unit.scheduler.simulated import SimulatedSystem, State, reborn

from weir.bus.messages import Outcome, Prefilled, Submit
from weir.policy.registry import PolicySpec, policy_names
from weir.scheduling.limits import CoreLimits, LaneLimits, TenantLimits

lane_names = st.sampled_from([lane.name for lane in LANES])
picks = st.integers(0, 10**6)


class SchedulerMachine(RuleBasedStateMachine):
    """The wire is a list of messages; the rules pick what becomes of each."""

    tenants: tuple[str, ...] = ("t",)

    def __init__(self) -> None:
        super().__init__()
        self.system = self.make_system()
        self.num_requests = 0
        self.num_births = 0

    def make_system(self) -> SimulatedSystem:
        return SimulatedSystem(make_limits(gather_s=1.0, tombstone_ttl_s=20.0))

    @initialize()
    def begin(self) -> None:
        for host in ("h1", "h2"):
            for role in ("prefill", "decode"):
                self.system.add_worker(make_worker(f"{role}-{host}", role, host=host, pages=16, seqs=3))
        self.system.add_gateway("g0")
        self.system.add_gateway("g1")
        for _ in range(3):
            self.system.pass_time()
            self.deliver_everything()

    def deliver_everything(self) -> None:
        while self.system.wire:
            self.system.deliver(self.system.wire.pop(0))

    @rule(lane=lane_names, prompt=st.integers(1, 120), max_tokens=st.integers(1, 60), gateway=picks, is_other=picks)
    def submit(self, lane: str, prompt: int, max_tokens: int, gateway: int, is_other: int) -> None:
        gateway_ids = sorted(self.system.gateways)
        model = "absent" if is_other % 20 == 0 else "m"
        self.num_requests += 1
        gateway_id = gateway_ids[gateway % len(gateway_ids)]
        tenant = self.tenants[is_other % len(self.tenants)]
        self.system.submit(Submit(f"r{self.num_requests}", gateway_id, model, lane, tenant, prompt, max_tokens, 0))

    @precondition(lambda self: self.system.wire)
    @rule(pick=picks)
    def a_message_arrives(self, pick: int) -> None:
        self.system.deliver(self.system.wire.pop(pick % len(self.system.wire)))

    @rule()
    def everything_arrives(self) -> None:
        self.deliver_everything()

    @precondition(lambda self: self.system.wire)
    @rule(pick=picks)
    def a_message_arrives_and_will_again(self, pick: int) -> None:
        self.system.deliver(self.system.wire[pick % len(self.system.wire)])

    @precondition(lambda self: self.system.wire)
    @rule(pick=picks)
    def a_message_is_lost(self, pick: int) -> None:
        self.system.wire.pop(pick % len(self.system.wire))

    @rule(pick=picks, outcome=st.sampled_from(Outcome))
    def a_gateway_closes_a_request(self, pick: int, outcome: Outcome) -> None:
        live = [(gateway, request) for gateway in self.system.gateways.values() for request in gateway.live()]
        if live:
            gateway, request = live[pick % len(live)]
            gateway.close(request, outcome)

    @rule(pick=picks)
    def the_workers_of_a_grant_cannot_be_reached(self, pick: int) -> None:
        granted = [(g, r) for g in self.system.gateways.values() for r in g.live() if r.state is State.GRANTED]
        if granted:
            gateway, request = granted[pick % len(granted)]
            gateway.submit_again(request)

    @rule(pick=picks)
    def a_worker_goes_or_comes_out_of_the_schedulers_hearing(self, pick: int) -> None:
        worker_ids = sorted(self.system.workers)
        self.system.silent ^= {worker_ids[pick % len(worker_ids)]}

    @rule(pick=picks)
    def a_prompt_is_prefilled(self, pick: int) -> None:
        granted = [r for g in self.system.gateways.values() for r in g.live() if r.state is State.GRANTED]
        if granted:
            request = granted[pick % len(granted)]
            assert request.placement is not None
            hint = Prefilled(request.submit.request_id, request.submit.gateway_id, request.placement.dispatch)
            self.system.wire.append(hint)

    @rule(steps=st.integers(1, 14))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.system.pass_time()

    @rule(steps=st.integers(1, 14))
    def time_passes_and_all_is_well(self, steps: int) -> None:
        for _ in range(steps):
            self.system.pass_time()
            self.deliver_everything()

    @rule(pick=picks)
    def a_worker_dies_and_another_is_born(self, pick: int) -> None:
        worker_ids = sorted(self.system.workers)
        record = self.system.workers.pop(worker_ids[pick % len(worker_ids)])
        self.num_births += 1
        self.system.add_worker(reborn(record, self.num_births))

    @rule(pick=picks)
    def a_gateway_dies_and_another_is_born(self, pick: int) -> None:
        gateway_ids = sorted(self.system.gateways)
        del self.system.gateways[gateway_ids[pick % len(gateway_ids)]]
        self.num_births += 1
        self.system.add_gateway(f"g{self.num_births}x")

    @rule()
    def the_scheduler_dies_and_another_takes_over(self) -> None:
        self.system.restart_core()

    @rule()
    def the_bus_goes_or_comes(self) -> None:
        self.system.is_bus_away = not self.system.is_bus_away
        self.system.core.bus_changed(is_connected=not self.system.is_bus_away)
        self.system.decide()

    def teardown(self) -> None:
        """From now on all is well, and gateways close what is granted: everything must come to its end."""
        system = self.system
        system.is_bus_away = False
        system.silent.clear()
        system.core.bus_changed(is_connected=True)
        longest_wait_s = max(lane.max_wait_s for lane in LANES)
        for _ in range(int(2 * longest_wait_s) + 60):
            system.pass_time()
            self.deliver_everything()
            for gateway in system.gateways.values():
                for request in gateway.live():
                    if request.state is State.GRANTED:
                        gateway.close(request, Outcome.FINISHED)
        self.deliver_everything()
        system.decide()
        ends = {i: request.ends for gateway in system.gateways.values() for i, request in gateway.requests.items()}
        assert all(len(how) == 1 for how in ends.values()), ends
        metrics = system.core.metrics()
        for name in ("queued", "granted", "reserved_pages", "prefills_in_flight"):
            assert metrics[name] == 0, (name, metrics)
        assert system.core.is_idle
        assert not system.waiting


TENANTS = (TenantLimits("a", 2.0, max_in_flight=2), TenantLimits("b", max_queued=5, tokens_per_min=5000))
FULL_LANES = (
    LaneLimits("interactive", 100, 20.0, guaranteed_share=0.3),
    LaneLimits("standard", 100, 30.0, ageing_s=5.0, guaranteed_share=0.2),
    LaneLimits("batch", 4, 60.0, ageing_s=3.0, max_batch=3),
)


def full_limits(**changes: float | str) -> CoreLimits:
    values = {"gather_s": 1.0, "tombstone_ttl_s": 20.0, "max_queued": 40, "max_prefills": 4, "max_prefill_tokens": 256}
    return CoreLimits(lanes=FULL_LANES, tenants=TENANTS, **values | changes)  # type: ignore[arg-type]


class FullMachine(SchedulerMachine):
    """With guarantees, ageing, tenants, slots over the number, and rules that change while it runs."""

    tenants = ("a", "b", "stranger")

    def make_system(self) -> SimulatedSystem:
        return SimulatedSystem(full_limits(), is_plain=False)

    @rule(name=st.sampled_from(policy_names()))
    def the_policy_changes(self, name: str) -> None:
        self.system.core.set_policy(PolicySpec(name).make())
        self.system.decide()

    @rule(lane_order=st.sampled_from(["strict", "weighted"]), tenant_order=st.sampled_from(["fair", "arrival"]))
    def the_limits_change(self, lane_order: str, tenant_order: str) -> None:
        self.system.limits = full_limits(lane_order=lane_order, tenant_order=tenant_order)
        self.system.core.set_limits(self.system.limits)
        self.system.decide()

    @rule(pick=picks, num_tokens=st.integers(0, 60))
    def tokens_are_delivered(self, pick: int, num_tokens: int) -> None:
        granted = sorted(self.system.grants)
        if granted:
            self.system.core.progressed(granted[pick % len(granted)], num_tokens)


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase
FullMachine.TestCase.settings = SchedulerMachine.TestCase.settings
TestFullScheduler = FullMachine.TestCase
