"""The screen of `weir top`, turned by textual's pilot."""

import re
from collections import defaultdict
from html import unescape
from pathlib import Path

from tests.unit.gateway.world import open_world

from weir.cli.top.app import TopApp
from weir.client.stack import StackClient
from weir.telemetry.stack_snapshot import (
    ArenaView,
    GatewayView,
    LaneView,
    LatencyView,
    SchedulerView,
    StackSnapshot,
    TenantView,
    WorkerFigures,
)

SCREEN = Path(__file__).with_name("top_screen.txt")
SNAPSHOT = StackSnapshot(
    at_s=1000.0,
    latency_window_s=60.0,
    gateway=GatewayView("gateway-0-aa", "0.1.0", 5, 1, 7, 1, 20, 12, 1, 0, 2, 2.5, 300.0, 123.4),
    scheduler=SchedulerView("scheduler-0-bb", 9, 3, 2, 1, 40, 2, 1),
    lanes=(LaneView("interactive", 1, 2, 0.25, 1200, 1.5, 100.0), LaneView("batch", 2, 0, 12.0, 3, None, None)),
    tenants=(TenantView("[bold]acme[/bold]", 20, 12, 2, 4000, 1500, 123.4),),
    workers=(
        WorkerFigures("decode-0-cc", "decode", "m", "h:1", "x", "serving", 6, 1, 32, 128, 70, 2, 0, 20.5, 0.0, 123.4),
        WorkerFigures("prefill-0-dd", "prefill", "m", "h:2", "x", "silent", 0, 0, 16, 128, 0, 0, 0, None, None, None),
    ),
    arenas=(ArenaView("transfer-0-ee", 4000, 2000, 1000, 0, 500, 500, 2, 9, 0.5),),
    latencies=(
        LatencyView("time_to_first_token", "m", "batch", 12, 80.0, 160.5, 1200.25),
        LatencyView("queue", "m", "batch", 0, None, None, None),
    ),
)
NOWHERE = "http://127.0.0.1:1"


def screen_of(app: TopApp) -> str:
    """The characters of the screen, without styles."""
    lines: dict[float, list[tuple[float, str]]] = defaultdict(list)
    for tag, text in re.findall(r"<text([^>]*)>(.*?)</text>", app.export_screenshot(simplify=True)):
        x, y = (float(re.search(rf' {name}="([\d.]+)"', tag)[1]) for name in "xy")  # type: ignore[index]
        lines[y].append((x, unescape(text).replace("\xa0", " ")))
    return "\n".join("".join(text for _, text in sorted(lines[y])).rstrip() for y in sorted(lines)) + "\n"


async def test_a_snapshot_is_shown_as_it_was() -> None:
    """To renew it: write `screen_of(app)` into the file, and look at it."""
    app = TopApp(StackClient(NOWHERE), interval_s=60.0)
    async with app.run_test(size=(120, 34)) as pilot:
        app.show(SNAPSHOT)
        app.query_one("#problem").display = False
        await pilot.pause()
        shown = screen_of(app)
    assert shown == SCREEN.read_text()


async def test_what_does_not_answer_is_said_and_the_figures_stay() -> None:
    app = TopApp(StackClient(NOWHERE), interval_s=60.0)
    async with app.run_test(size=(120, 34)) as pilot:
        app.show(SNAPSHOT)
        await app.look()
        await pilot.pause()
        shown = screen_of(app)
    assert "does not answer" in shown
    assert "decode-0-cc" in shown


async def test_it_shows_a_gateway_pauses_and_changes_its_theme() -> None:
    async with open_world() as world:
        app = TopApp(StackClient(world.http_url), interval_s=60.0)
        async with app.run_test(size=(120, 34)) as pilot:
            await pilot.pause()
            assert "0 open, no scheduler" in screen_of(app)
            theme = app.theme
            await pilot.press("t")
            assert app.theme != theme
            await pilot.press("space")
            await pilot.pause()
            assert "paused" in screen_of(app)
            app.show(SNAPSHOT)
            await app.look()
            await pilot.pause()
            assert "decode-0-cc" in screen_of(app)
            await pilot.press("q")
        assert not app.is_running
