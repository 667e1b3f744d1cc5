"""What the scheduler says to the gateway, and the list of held requests that the gateway says every second."""

import asyncio
import logging

from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import Ack, Grant, GrantReply, Revoke
from weir.bus.subjects import Subjects
from weir.core.errors import Unavailable
from weir.core.life import Phase
from weir_gateway.call import RETRY_AFTER_S
from weir_gateway.control import SchedulerPort, refusal_error
from weir_gateway.driver import Driver

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
        """A repeated grant is accepted again; another one for a request that runs already is not."""
        call = self._driver.try_find(grant.request_id)
        if not self._port.hear(grant.epoch) or call is None or call.request.phase.is_terminal:
            return GrantReply(accepted=False)
        if call.request.placement is None and call.is_known_to_scheduler:
            call.request.granted(grant.placement)
            call.granted.set_result(grant.placement)
        return GrantReply(accepted=call.request.placement == grant.placement)

    async def on_revoke(self, revoke: Revoke) -> Ack:
        """One that speaks of an earlier dispatch than the present one comes too late to matter."""
        call = self._driver.try_find(revoke.request_id)
        if self._port.hear(revoke.epoch) and call is not None:
            placement = call.request.placement
            if revoke.dispatch == (0 if placement is None else placement.dispatch):
                self._port.refused(revoke.reason)
                call.give_up(refusal_error(call.request.checked, revoke.reason, revoke.message, revoke.retry_after_ms))
        return Ack(self._port.epoch)

    async def report_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._report_interval_s)
            try:
                await self._report()
            except Exception:  # the boundary of one report: without reports the scheduler would drop every request
                logger.exception("the report of held requests failed")

    async def _report(self) -> None:
        held = [call for call in self._driver.calls() if call.request.phase in _HELD]
        messages = [call.request.held_message(call.output.num_tokens) for call in held]
        for request_id in await self._port.report(messages):
            call = self._driver.try_find(request_id)
            if call is not None:
                call.give_up(Unavailable("the scheduler does not know the request", retry_after_s=RETRY_AFTER_S))
