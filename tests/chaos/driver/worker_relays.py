"""Relays between gateways and workers, which come and go with the workers."""

import contextlib
import threading
from collections.abc import Callable

from tests.chaos.relay import Relay, tcp_ports_of

WORKER_HOST = "127.0.0.2"
"""What workers advertise: a relay listens there, at the very port at which the worker listens on 127.0.0.1."""
_INTERVAL_S = 0.05
_END_TIMEOUT_S = 5.0


class WorkerRelays:
    """Looks for new workers 20 times a second: they load weights for longer before they register."""

    def __init__(self, find_pids: Callable[[], set[int]]) -> None:
        self._find_pids = find_pids
        self._relays: dict[int, Relay] = {}
        """By the worker's process."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="worker-relays", daemon=True)
        self._thread.start()

    def try_find(self, pid: int) -> Relay | None:
        return self._relays.get(pid)

    def check(self) -> None:
        """Raises RuntimeError once nobody looks for workers any more: no new one would be reached."""
        if not self._thread.is_alive():
            raise RuntimeError("the thread of the workers' relays has died")

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_END_TIMEOUT_S)
        for relay in self._relays.values():
            relay.close()

    def _follow(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            pids = self._find_pids()
            for pid in self._relays.keys() - pids:
                self._relays.pop(pid).close()
            for pid in pids - self._relays.keys():
                for port in tcp_ports_of(pid, listening=True):
                    with contextlib.suppress(OSError):  # in use there for a moment: the next round tries again
                        self._relays[pid] = Relay("127.0.0.1", port, listen_host=WORKER_HOST, listen_port=port)
