"""What the client of NATS raises reaches the rest as an error of the bus."""

from unittest.mock import Mock

import nats.errors
import nats.js.errors
import pytest

from weir.bus.nats import NatsBus
from weir.bus.protocol import BusTimeout, BusUnavailable, NoResponder


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (nats.errors.NoRespondersError(), NoResponder),
        (TimeoutError(), BusTimeout),
        (nats.js.errors.ServiceUnavailableError(code=503, description="no leader"), BusUnavailable),
        (nats.js.errors.ServerError(code=500, err_code=10047, description="insufficient storage"), BusUnavailable),
    ],
)
def test_whoever_waits_for_the_bus_sees_its_own_errors(raised: Exception, told: type[Exception]) -> None:
    bus = NatsBus(Mock(is_connected=True), "nats://here")
    with pytest.raises(told), bus.mapped_errors("key"):
        raise raised
