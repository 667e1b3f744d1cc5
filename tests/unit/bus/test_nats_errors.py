"""What the client of NATS raises reaches the rest as an error of the bus."""

from unittest.mock import Mock

import nats.errors
import nats.js.errors
import pytest

from weir.bus.nats import NatsBus
from weir.bus.protocol import BusRefused, BusTimeout, BusUnavailable, NoResponder


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (nats.errors.NoRespondersError(), NoResponder),
        (TimeoutError(), BusTimeout),
        (nats.js.errors.ServiceUnavailableError(code=503, description="no leader"), BusUnavailable),
        (nats.js.errors.ServerError(code=500, err_code=10047, description="insufficient storage"), BusUnavailable),
        (nats.js.errors.BadRequestError(code=400, err_code=10027, description="maximum number of streams"), BusRefused),
        (nats.js.errors.APIError(code=403, description="not allowed"), BusRefused),
        (nats.js.errors.KeyWrongLastSequenceError(), nats.js.errors.KeyWrongLastSequenceError),
        (nats.js.errors.KeyNotFoundError(), nats.js.errors.KeyNotFoundError),
        (nats.js.errors.NotFoundError(code=404, err_code=10059), nats.js.errors.NotFoundError),
    ],
)
def test_whoever_waits_for_the_bus_sees_its_own_errors(raised: Exception, told: type[Exception]) -> None:
    bus = NatsBus(Mock(is_connected=True), "nats://here")
    with pytest.raises(told), bus.mapped_errors("key"):
        raise raised


async def test_no_error_and_no_log_line_shows_the_password_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    url = "nats://weir:s3cret@127.0.0.1:1"
    with pytest.raises(BusUnavailable) as unreached:
        await NatsBus.connect(url, name="test", timeout_s=0.2)
    with pytest.raises(BusUnavailable) as unconnected, NatsBus(Mock(is_connected=False), url).mapped_errors("key"):
        pass
    with pytest.raises(BusUnavailable) as failed, NatsBus(Mock(is_connected=True), url).mapped_errors("key"):
        raise ConnectionError("broken")
    bus = NatsBus(Mock(is_closed=False), url)
    await bus._on_disconnected()
    await bus._on_reconnected()
    for error in (unreached, unconnected, failed):
        assert "nats://***@127.0.0.1:1" in str(error.value)
    assert caplog.text.count("nats://***@127.0.0.1:1") == 2
    assert "s3cret" not in caplog.text + str(unreached.value) + str(unconnected.value) + str(failed.value)
