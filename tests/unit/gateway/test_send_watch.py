"""A client that takes nothing is noticed after the time that it has, whatever it took before."""

import asyncio
import contextlib

from weir_gateway.frontends.send_watch import SendWatch

TIMEOUT_S = 60.0


class ManualLoop(asyncio.SelectorEventLoop):
    """Its time stands still until `advance`."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    async def advance(self, by_s: float) -> None:
        self.now_s += by_s
        for _ in range(3):
            await asyncio.sleep(0)


def test_a_send_that_takes_too_long_is_noticed_once_and_others_are_not() -> None:
    loop = ManualLoop()
    late_at_s: list[float] = []

    async def send() -> None:
        with contextlib.closing(SendWatch(TIMEOUT_S, lambda: late_at_s.append(loop.time()))) as watch:
            for _ in range(4):  # together they take longer than one may
                watch.begin()
                await loop.advance(TIMEOUT_S * 0.4)
                watch.end()
            await loop.advance(TIMEOUT_S * 2)  # nothing is sent
            watch.begin()
            for _ in range(20):
                await loop.advance(TIMEOUT_S / 10)

    loop.run_until_complete(send())
    began_s = 3.6 * TIMEOUT_S
    assert len(late_at_s) == 1
    assert began_s + TIMEOUT_S - 1e-6 <= late_at_s[0] <= began_s + 1.1 * TIMEOUT_S + 1e-6
    loop.close()
