"""A core with a clock that stands still, and short words for what happens to it."""

from collections.abc import Sequence
from dataclasses import replace

from weir.bus.messages import (
    Cancel,
    Finish,
    Held,
    HeldRequest,
    Outcome,
    Placement,
    Prefilled,
    Revoke,
    Submit,
    SubmitReply,
    WorkerRecord,
)
from weir.core.clock import ManualClock
from weir.scheduling.commands import Command, SendGrant, SendRevoke
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits, LaneLimits

LANES = (LaneLimits("interactive", 100, 20.0), LaneLimits("standard", 100, 30.0), LaneLimits("batch", 4, 60.0))


def make_limits(**changes: float) -> CoreLimits:
    """Decode slots are not overcommitted unless it says so."""
    values = {"max_prefills": 4, "max_prefill_tokens": 256, "slot_overcommit": 0.0} | changes
    return CoreLimits(lanes=LANES, **values)  # type: ignore[arg-type]


def make_submit(
    request_id: str,
    lane: str = "",
    *,
    prompt: int = 16,
    max_tokens: int = 16,
    model: str = "m",
    deadline_ms: int = 0,
    gateway: str = "g",
    tenant: str = "tenant",
    **hints: float | str,
) -> Submit:
    whole = Submit(request_id, gateway, model, lane, tenant, prompt, max_tokens, deadline_ms)
    return replace(whole, **hints)  # type: ignore[arg-type]


def make_worker(
    worker_id: str,
    role: str,
    *,
    host: str = "h",
    model: str = "m",
    pages: int = 100,
    seqs: int = 8,
    context: int = 2048,
    running: int = 0,
    waiting: int = 0,
    draining: bool = False,
) -> WorkerRecord:
    address = f"address-of-{worker_id}"
    return WorkerRecord(worker_id, role, model, address, host, context, 16, pages, seqs, running, waiting, draining)


class Rig:
    """After `start` the core has gathered and has one prefill worker p and one decode worker d on host h."""

    def __init__(self, limits: CoreLimits | None = None, epoch: int = 7) -> None:
        self.limits = limits or make_limits()
        self.clock = ManualClock(1000.0)
        self.core = SchedulerCore(self.limits, self.clock, epoch)
        self.commands: list[Command] = []
        self.workers: dict[str, WorkerRecord] = {}
        self.gateways: dict[str, list[HeldRequest]] = {"g": []}
        self._sequence = 0
        self._revision = 0

    def start(self, *workers: WorkerRecord) -> "Rig":
        self.put(*(workers or (make_worker("p", "prefill"), make_worker("d", "decode"))))
        self.clock.advance(self.limits.gather_s)
        self.core.tick()
        self.decide()
        return self

    def put(self, *workers: WorkerRecord) -> None:
        for worker in workers:
            self._revision += 1
            self.workers[worker.worker_id] = worker
            self.core.worker_seen(worker, self._revision)

    def decide(self) -> Sequence[Command]:
        decided = self.core.decide()
        self.commands += decided
        for command in decided:
            if isinstance(command, SendRevoke):
                self.forget(command.revoke.request_id)
        assert self.core.check_integrity() == ()
        return decided

    def submit(self, request_id: str, lane: str = "", **changes: float | str) -> SubmitReply:
        """Submitted, and held by its gateway from then on if it was queued."""
        submit = make_submit(request_id, lane, **changes)  # type: ignore[arg-type]
        reply = self.core.submit(submit)
        if reply.queued:
            self.gateways.setdefault(submit.gateway_id, []).append(HeldRequest(submit, None))
        self.decide()
        return reply

    def finish(
        self,
        request_id: str,
        outcome: Outcome = Outcome.FINISHED,
        dispatch: int = 1,
        num_output_tokens: int = 3,
    ) -> None:
        self.forget(request_id)
        self.core.finish(Finish(request_id, "g", dispatch, outcome, num_output_tokens))
        self.decide()

    def cancel(self, request_id: str) -> None:
        self.forget(request_id)
        self.core.cancel(Cancel(request_id, "g"))
        self.decide()

    def prefilled(self, request_id: str, dispatch: int = 1) -> None:
        self.core.prefilled(Prefilled(request_id, "g", dispatch))
        self.decide()

    def forget(self, request_id: str) -> None:
        """Its gateway does not hold it any more."""
        for held in self.gateways.values():
            held[:] = [entry for entry in held if entry.submit.request_id != request_id]

    def keep_workers(self) -> None:
        """All of them say that they live."""
        self.put(*list(self.workers.values()))

    def say_held(self, sequence: int = 0) -> None:
        self._sequence = max(self._sequence + 1, sequence)
        for gateway_id, held in self.gateways.items():
            self.core.held(Held(gateway_id, self._sequence, tuple(held)))

    def run(self, seconds: float, *, silent: Sequence[str] = ()) -> None:
        """Time passes; workers and gateways speak every half second, but for the silent ones."""
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            self._sequence += 1
            self.put(*(worker for worker_id, worker in list(self.workers.items()) if worker_id not in silent))
            for gateway_id, held in self.gateways.items():
                if gateway_id not in silent:
                    self.core.held(Held(gateway_id, self._sequence, tuple(held)))
            self.core.tick()
            self.decide()

    @property
    def granted(self) -> list[str]:
        """Ids in the order of their grants."""
        return [command.grant.request_id for command in self.commands if isinstance(command, SendGrant)]

    @property
    def revoked(self) -> dict[str, Revoke]:
        return {c.revoke.request_id: c.revoke for c in self.commands if isinstance(c, SendRevoke)}

    def placement(self, request_id: str) -> Placement:
        return next(
            command.grant.placement
            for command in reversed(self.commands)
            if isinstance(command, SendGrant) and command.grant.request_id == request_id
        )

    def metric(self, name: str) -> float:
        return self.core.metrics().get(name, 0.0)
