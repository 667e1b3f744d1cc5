"""The scheduler's messages to the gateway, and the list of held requests that it gets every second."""

import asyncio
import logging

from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import Ack, Grant, GrantReply, Revoke
from weir.bus.subjects import Subjects
from weir.core.errors import Unavailable
from weir.core.life import Phase
from weir_gateway.driving.driver import Driver
from weir_gateway.driving.scheduler_messages import refusal_error
from weir_gateway.driving.scheduler_port import SchedulerPort
from weir_gateway.requests.request_state import RETRY_AFTER_S

logger = logging.getLogger(__name__)

_HELD = (Phase.QUEUED, Phase.GRANTED, Phase.PREFILLING, Phase.HANDING_OFF, Phase.DECODING)


class SchedulerInbox:
    """Passes grants and revocations on to the requests they are for."""

    def __init__(self, port: SchedulerPort, driver: Driver, *, report_interval_s: float = 1.0) -> None:
        self._port = port
        self._driver = driver
        self._report_interval_s = report_interval_s

    async def subscribe(self, endpoint: BusEndpoint, subjects: Subjects, gateway_id: str) -> None:
        await endpoint.serve(subjects.grant(gateway_id), Grant, self.on_grant)
        await endpoint.serve(subjects.revoke(gateway_id), Revoke, self.on_revoke)

    async def on_grant(self, grant: Grant) -> GrantReply:
        """A repeated grant is accepted again; another one of the same dispatch is not, nor one of an older one."""
        state = self._driver.try_find(grant.request_id)
        if not self._port.accept_epoch(grant.epoch) or state is None or state.phase.is_terminal:
            return GrantReply(accepted=False)
        is_asked_for = state.is_known_to_scheduler and grant.placement.dispatch == state.dispatch
        if state.placement is None and is_asked_for:
            state.grant(grant.placement)
        return GrantReply(accepted=state.placement == grant.placement)

    async def on_revoke(self, revoke: Revoke) -> Ack:
        """One of an earlier dispatch comes too late to matter, and so does any once there is a grant."""
        state = self._driver.try_find(revoke.request_id)
        if not self._port.accept_epoch(revoke.epoch) or state is None:
            return Ack(self._port.epoch)
        if state.placement is None and revoke.dispatch == state.dispatch:
            self._port.count_refusal(revoke.reason)
            state.revoke(refusal_error(state.checked, revoke.reason, revoke.message, revoke.retry_after_ms))
        return Ack(self._port.epoch)

    async def report_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._report_interval_s)
            try:
                await self._report()
            except Exception:  # the boundary of one report: without reports the scheduler would drop every request
                logger.exception("the report of held requests failed")

    async def _report(self) -> None:
        held = [state for state in self._driver.states() if state.phase in _HELD]
        for refused in await self._port.report(held):
            state = self._driver.try_find(refused.submit.request_id)
            # What was granted or submitted again meanwhile is not what was refused.
            if state is None or (state.dispatch, state.placement) != (refused.submit.dispatch, refused.placement):
                continue
            state.revoke(Unavailable("the scheduler does not know the request", retry_after_s=RETRY_AFTER_S))
