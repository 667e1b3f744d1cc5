"""Each kind of fault between two hosts, or of one of them: what it does, for how long, and how it ends."""

import random
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tests.hosts.chaos.stack import HostProcess, StackOfHosts
from tests.hosts.lab import Host

_LASTING_S = (0.3, 1.0, 4.0)
_CUT_S = (0.5, 2.0, 8.0)
_OFF_S = (0.0, 3.0)
_SLOW_MBIT = (5.0, 50.0)
_UNDO_TIMEOUT_S = 60.0
_NOT_MADE = (RuntimeError, subprocess.TimeoutExpired)


@dataclass(frozen=True)
class Fault:
    """One to come. `victims`: names of the processes, or hosts, that clients may notice it at."""

    kind: str
    doing: str
    victims: tuple[str, ...]
    inflict: Callable[[], bool]
    """Blocks until it is over; False: it could not be made."""


class FaultMaker:
    """Chooses faults from a seed."""

    def __init__(self, stack: StackOfHosts, source: random.Random) -> None:
        self._stack = stack
        self._source = source
        self._makers: tuple[tuple[int, Callable[[], Fault | None]], ...] = (
            (10, self._kill),
            (4, self._freeze),
            (2, self._restart),
            (2, self._power_loss),
            (3, self._partition),
            (3, self._one_way),
            (2, self._host_cut),
            (2, self._nats_cut),
            (2, self._slow_link),
            (1, self._renewed),
            (2, self._drain),
        )

    def choose(self) -> Fault:
        weights = [weight for weight, _ in self._makers]
        while True:
            [(_, maker)] = self._source.choices(self._makers, weights)
            fault = maker()
            if fault is not None:
                return fault

    def _kill(self) -> Fault | None:
        return self._signalled("kill", lambda victim: self._stack.send(victim, "KILL"))

    def _restart(self) -> Fault | None:
        return self._signalled("restart", lambda victim: self._stack.send(victim, "TERM"))

    def _freeze(self) -> Fault | None:
        lasting_s = self._source.choice(_LASTING_S)

        def freeze(victim: HostProcess) -> bool:
            is_stopped = self._stack.send(victim, "STOP")
            time.sleep(lasting_s)
            self._stack.send(victim, "CONT")
            return is_stopped

        return self._signalled("stop and continue", freeze)

    def _signalled(self, kind: str, inflict: Callable[[HostProcess], bool]) -> Fault | None:
        """None: there is no process at the moment. Transfer services are twice as often chosen."""
        processes = [process for process in self._stack.processes() if process.is_ready]
        if not processes:
            return None
        weights = [2 if process.state.role == "transfer" else 1 for process in processes]
        [victim] = self._source.choices(processes, weights)
        noticed = (victim.host.name,) if victim.state.role == "gateway" else ()
        return Fault(kind, victim.state.role, noticed, lambda: inflict(victim))

    def _power_loss(self) -> Fault:
        host, off_s = self._host(), self._source.choice(_OFF_S)

        def lose() -> bool:
            host.power_off()
            time.sleep(off_s)
            host.power_on()
            self._stack.start(host)
            return True

        return Fault("power loss", "a host", (host.name,), lose)

    def _partition(self) -> Fault:
        one, other = self._stack.pair

        def cut() -> None:
            one.cut(to=other)
            other.cut(to=one)

        return self._lasting(
            "partition", "both directions", (), cut, lambda: one.mend(to=other), lambda: other.mend(to=one)
        )

    def _one_way(self) -> Fault:
        one, other = self._shuffled()
        return self._lasting("partition", "one direction", (), lambda: one.cut(to=other), lambda: one.mend(to=other))

    def _host_cut(self) -> Fault:
        host = self._host()
        return self._lasting("cut off from all", "a host", (host.name,), host.cut, host.mend)

    def _nats_cut(self) -> Fault:
        host, nats = self._host(), self._stack.nats

        def cut() -> None:
            host.cut(to=nats)
            nats.cut(to=host)

        return self._lasting(
            "cut off from NATS", "a host", (), cut, lambda: host.mend(to=nats), lambda: nats.mend(to=host)
        )

    def _slow_link(self) -> Fault:
        host, rate = self._host(), self._source.choice(_SLOW_MBIT)
        return self._lasting("slow link", f"{rate:g} Mbit/s", (), lambda: host.shape(rate), host.unshape)

    def _renewed(self) -> Fault:
        def renew() -> bool:
            self._stack.renew_certificates()
            return True

        return Fault("certificates renewed", "all", (), renew)

    def _drain(self) -> Fault:
        host, other = self._shuffled()

        def drain() -> bool:
            try:
                self._stack.weir(other, "drain", "--host", host.name, "--grace-s", "0", "--wait")
                is_drained = True
            except _NOT_MADE:  # another fault is at the scheduler, or at the host
                is_drained = False
            self._undo_drain(host)
            return is_drained

        return Fault("drain", "a host", (), drain)

    def _undo_drain(self, host: Host) -> None:
        """By a scheduler of either host. Raises what the last one said."""
        ends_at_s = time.monotonic() + _UNDO_TIMEOUT_S
        while True:
            for asked in self._stack.pair:
                try:
                    self._stack.weir(asked, "drain", "--host", host.name, "--undo")
                except _NOT_MADE:
                    if time.monotonic() > ends_at_s:
                        raise
                else:
                    return

    def _lasting(
        self,
        kind: str,
        doing: str,
        victims: tuple[str, ...],
        begin: Callable[[], object],
        *ends: Callable[[], object],
    ) -> Fault:
        lasting_s = self._source.choice(_CUT_S)

        def inflict() -> bool:
            is_made = False
            with suppress(RuntimeError):  # the host is off
                begin()
                is_made = True
                time.sleep(lasting_s)
            for end in ends:
                with suppress(RuntimeError):  # it has lost its power, and with it what was done to its link
                    end()
            return is_made

        return Fault(kind, doing, victims, inflict)

    def _host(self) -> Host:
        return self._source.choice(self._stack.pair)

    def _shuffled(self) -> tuple[Host, Host]:
        one, other = self._source.sample(self._stack.pair, 2)
        return one, other
