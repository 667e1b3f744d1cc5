"""Certificates that change while they are used, as cert-manager, SPIRE or `weir certs` write them.

files ─ every few seconds: changed? ─> tried ─> current, version + 1 ─> who listens
                                         └ not usable: the one before stays, told once
"""

import asyncio
import logging
import time
from collections.abc import Callable

from weir.rpc.tls.certificates import Certificate, CertificateError, CertificateFiles, Stamp

_log = logging.getLogger(__name__)
CHECK_INTERVAL_S = 2.0
_WARN_AT_SHARE = 0.25
"""Of its life, that is left."""
_WARN_INTERVAL_S = 3600.0

CheckCertificate = Callable[[Certificate], None]
"""Raises CertificateError for one that this process must not use."""


class CertificateWatch:
    """`current` is always one that has been tried. Raises CertificateError where there is none at the beginning."""

    def __init__(
        self,
        files: CertificateFiles,
        check: CheckCertificate | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._files = files
        self._check = check
        self._now_s = now_s
        self._stamp = files.stamp()
        self._suspect: Stamp | None = None
        """What the last look could not use."""
        self._refused: Stamp | None = None
        self._warned_at_s = float("-inf")
        self._listeners: list[Callable[[Certificate], None]] = []
        self.num_refused = 0
        """Files that changed to what cannot be used."""
        self.version = 0
        """One more at each change of `current`."""
        self.current = self._load()

    def on_change(self, listener: Callable[[Certificate], None]) -> None:
        """Called with each new one, in the event loop."""
        self._listeners.append(listener)

    async def run(self, interval_s: float = CHECK_INTERVAL_S) -> None:
        """Looks for ever."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.look()
            except Exception:  # noqa: BLE001 - the boundary of this task, which must look again
                _log.exception("%s_cert %s could not be looked at", self._files.setting, self._files.cert)

    async def look(self) -> None:
        """Once. Files that cannot be used are tried again at each look, since they may be half written; that is told
        where a second look finds the same. Raises what a listener raises, and tries again then too."""
        self._warn_of_end()
        stamp = self._files.stamp()
        if stamp == self._stamp:
            return
        try:
            found = await asyncio.to_thread(self._load)
        except CertificateError as error:
            self._refuse(stamp, error)
            return
        if found != self.current:
            for listener in self._listeners:
                listener(found)
            self.current = found
            self.version += 1
            self._warned_at_s = float("-inf")
            _log.info("%s_cert %s has changed: new connections use it", self._files.setting, self._files.cert)
        self._stamp, self._suspect, self._refused = stamp, None, None

    def _refuse(self, stamp: Stamp, error: CertificateError) -> None:
        if stamp == self._suspect and stamp != self._refused:
            self._refused = stamp
            self.num_refused += 1
            _log.warning("the new certificate is not used, the one before is: %s", error.message)
        self._suspect = stamp

    def left_s(self) -> float:
        """Seconds until it expires; negative once it has."""
        return self.current.expires_at_s - self._now_s()

    def metrics(self) -> dict[str, float]:
        """By the name of the setting."""
        name = self._files.setting
        return {
            f"certificate_left_s_{name}": self.left_s(),
            f"certificate_changes_total_{name}": float(self.version),
            f"certificate_refusals_total_{name}": float(self.num_refused),
        }

    def _load(self) -> Certificate:
        found = self._files.load()
        if self._check is not None:
            self._check(found)
        return found

    def _warn_of_end(self) -> None:
        left_s, now_s = self.left_s(), self._now_s()
        life_s = self.current.expires_at_s - self.current.begins_at_s
        if left_s > _WARN_AT_SHARE * life_s or now_s - self._warned_at_s < _WARN_INTERVAL_S:
            return
        self._warned_at_s = now_s
        if left_s <= 0:
            _log.error("%s_cert %s has expired: nobody connects any more", self._files.setting, self._files.cert)
        else:
            _log.warning("%s_cert %s expires in %.1f h: renew it", self._files.setting, self._files.cert, left_s / 3600)
