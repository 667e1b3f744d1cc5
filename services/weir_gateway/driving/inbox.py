"""What the scheduler says to the gateway, and the list of held requests that the gateway says every second."""

import asyncio
import logging

from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import Ack, Grant, GrantReply, Revoke
from weir.bus.subjects import Subjects
from weir.core.errors import Unavailable
from weir.core.life import Phase
from weir_gateway.driving.call import RETRY_AFTER_S
from weir_gateway.driving.driver import Driver
from weir_gateway.scheduler_port import SchedulerPort, refusal_error

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
        call = self._driver.try_find(grant.request_id)
        if not self._port.hear(grant.epoch) or call is None or call.request.phase.is_terminal:
            return GrantReply(accepted=False)
        is_asked_for = call.is_known_to_scheduler and grant.placement.dispatch == call.request.dispatch
        if call.request.placement is None and is_asked_for:
            call.request.granted(grant.placement)
            call.granted.set_result(grant.placement)
        return GrantReply(accepted=call.request.placement == grant.placement)

    async def on_revoke(self, revoke: Revoke) -> Ack:
        """One that speaks of an earlier dispatch comes too late to matter, and so does any once there is a grant."""
        call = self._driver.try_find(revoke.request_id)
        if self._port.hear(revoke.epoch) and call is not None:
            request = call.request
            if request.placement is None and revoke.dispatch == request.dispatch:
                self._port.refused(revoke.reason)
                call.give_up(refusal_error(request.checked, revoke.reason, revoke.message, revoke.retry_after_ms))
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
        messages = {call.request.request_id: call.request.held_message(call.output.num_tokens) for call in held}
        for request_id in await self._port.report(messages.values()):
            call, said = self._driver.try_find(request_id), messages.get(request_id)
            # What was granted or submitted again meanwhile is not what was refused.
            if call is not None and said is not None and call.is_still(said):
                call.give_up(Unavailable("the scheduler does not know the request", retry_after_s=RETRY_AFTER_S))
