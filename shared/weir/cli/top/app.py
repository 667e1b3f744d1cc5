"""The screen of `weir top`, on textual: a table for each part of a snapshot, renewed in place."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from weir.client.stack import StackClient
from weir.core.errors import WeirError
from weir.telemetry.stack_snapshot import StackSnapshot, WorkerFigures

_DARK, _LIGHT = "textual-dark", "textual-light"
_NONE = "-"
_BAR_CHARS = 24
_LATENCY_NAMES = {
    "time_to_first_token": "first token",
    "inter_token": "between tokens",
    "time_per_output_token": "per token",
    "queue": "in the queue",
    "end_to_end": "whole request",
}

Cell = str | Text
Rows = Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class _Part:
    """One table. Columns whose names begin with a space are numbers, and stand at the right."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Callable[[StackSnapshot], Rows]


def headline(snapshot: StackSnapshot) -> str:
    """What comes first: how much is asked and answered."""
    gateway, scheduler = snapshot.gateway, snapshot.scheduler
    queued = "no scheduler" if scheduler is None else f"{scheduler.num_queued} queued, {scheduler.num_granted} granted"
    rates = (
        f"{_rate(gateway.requests_per_s)} requests/s, {_rate(gateway.prompt_tokens_per_s)} prompt and "
        f"{_rate(gateway.output_tokens_per_s)} answer tokens/s"
    )
    ends = f"{gateway.num_finished:,} finished, {gateway.num_failed:,} failed, {gateway.num_refused:,} refused"
    return f"{gateway.process_id}: {gateway.num_open} open, {queued}; {rates}\n{ends}"


def _lane_rows(snapshot: StackSnapshot) -> Rows:
    return [
        (
            lane.lane,
            str(lane.num_queued),
            str(lane.num_in_flight),
            f"{lane.oldest_wait_s:.1f}",
            _rate(lane.grants_per_s),
            _rate(lane.output_tokens_per_s),
            f"{lane.num_granted:,}",
        )
        for lane in snapshot.lanes
    ]


def _worker_rows(snapshot: StackSnapshot) -> Rows:
    return [
        (
            worker.worker_id,
            worker.role,
            worker.model,
            _duty(worker),
            f"{worker.num_running}/{worker.max_num_seqs}",
            str(worker.num_waiting),
            _rate(worker.steps_per_s),
            _rate(worker.prompt_tokens_per_s),
            _rate(worker.output_tokens_per_s),
            f"{worker.num_used_pages:,}",
            f"{worker.num_preemptions:,}",
        )
        for worker in snapshot.workers
    ]


def _arena_rows(snapshot: StackSnapshot) -> Rows:
    return [
        (
            arena.process_id,
            _bar(arena.num_pages, arena.num_leased + arena.num_orphaned, arena.num_shared, arena.num_cached),
            f"{arena.num_free:,}",
            f"{arena.num_leased:,}",
            f"{arena.num_shared:,}",
            f"{arena.num_cached:,}",
            f"{arena.num_orphaned:,}",
            _NONE if arena.prefix_hit_ratio is None else f"{arena.prefix_hit_ratio:.0%}",
        )
        for arena in snapshot.arenas
    ]


def _latency_rows(snapshot: StackSnapshot) -> Rows:
    return [
        (
            _LATENCY_NAMES[view.name],
            view.lane,
            view.model,
            f"{view.num:,}",
            *(_milliseconds(value) for value in (view.p50_ms, view.p90_ms, view.p99_ms)),
        )
        for view in snapshot.latencies
        if view.num
    ]


def _tenant_rows(snapshot: StackSnapshot) -> Rows:
    return [
        (
            tenant.tenant,
            f"{tenant.num_accepted:,}",
            f"{tenant.num_finished:,}",
            f"{tenant.num_refused:,}",
            f"{tenant.num_prompt_tokens:,}",
            f"{tenant.num_output_tokens:,}",
            _rate(tenant.output_tokens_per_s),
        )
        for tenant in snapshot.tenants
    ]


_PARTS = (
    _Part(
        "lanes", "lanes", ("lane", " queued", " running", " oldest s", " grants/s", " tokens/s", " granted"), _lane_rows
    ),
    _Part(
        "workers",
        "workers",
        (
            "worker",
            "role",
            "model",
            "duty",
            " batch",
            " waiting",
            " steps/s",
            " prompt/s",
            " answer/s",
            " pages",
            " gave way",
        ),
        _worker_rows,
    ),
    _Part(
        "arenas",
        "pages",
        ("arena", "use", " free", " held", " prefix in use", " prefix", " orphaned", " found"),
        _arena_rows,
    ),
    _Part(
        "latencies",
        "latencies",
        ("latency", "lane", "model", " values", " p50 ms", " p90 ms", " p99 ms"),
        _latency_rows,
    ),
    _Part(
        "tenants",
        "tenants",
        ("tenant", " accepted", " finished", " refused", " prompt tokens", " answer tokens", " tokens/s"),
        _tenant_rows,
    ),
)


class TopApp(App[None]):
    """Asks the gateway anew each interval; closes the client at its end."""

    TITLE = "weir top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #headline { padding: 0 1; height: auto; }
    #problem { padding: 0 1; height: auto; color: $error; display: none; }
    DataTable { height: auto; border: round $panel; border-title-color: $text-muted; }
    DataTable:focus { border: round $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("space", "pause", "Pause"),
        ("t", "switch_theme", "Light or dark"),
    ]

    def __init__(self, client: StackClient, interval_s: float = 1.0) -> None:
        super().__init__()
        self._client = client
        self._interval_s = interval_s
        self._is_paused = False

    def compose(self) -> ComposeResult:
        yield Static("asking …", id="headline", markup=False)
        yield Static("", id="problem", markup=False)
        with VerticalScroll(can_focus=False):
            for part in _PARTS:
                table: DataTable[Cell] = DataTable(id=part.name, cursor_type="row", zebra_stripes=True)
                table.border_title = part.title
                yield table
        yield Footer()

    async def on_mount(self) -> None:
        self.theme = _DARK
        for part in _PARTS:
            self._table(part).add_columns(*(_heading(column) for column in part.columns))
        await self.look()
        self.set_interval(self._interval_s, self.look)

    async def on_unmount(self) -> None:
        await self._client.close()

    async def look(self) -> None:
        """What cannot be asked is said, and the last figures stay."""
        if self._is_paused:
            return
        try:
            snapshot = await self._client.snapshot()
        except WeirError as error:
            self._say(error.message)
            return
        self._say("")
        self.show(snapshot)

    def show(self, snapshot: StackSnapshot) -> None:
        self.query_one("#headline", Static).update(headline(snapshot))
        for part in _PARTS:
            table = self._table(part)
            if part.name == "latencies":
                table.border_title = f"latencies, {_window(snapshot.latency_window_s)}"
            _fill(table, part.columns, part.rows(snapshot))

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._say("paused; space goes on" if self._is_paused else "")

    def action_switch_theme(self) -> None:
        self.theme = _LIGHT if self.theme == _DARK else _DARK

    def _table(self, part: _Part) -> "DataTable[Cell]":
        return self.query_one(f"#{part.name}", DataTable)

    def _say(self, problem: str) -> None:
        line = self.query_one("#problem", Static)
        line.update(problem)
        line.display = bool(problem)


def _fill(table: "DataTable[Cell]", columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """The row that is marked stays marked."""
    row = table.cursor_row
    table.clear()
    for cells in rows:
        table.add_row(*(_aligned(cell, column) for cell, column in zip(cells, columns, strict=True)))
    table.display = bool(table.row_count)
    if table.row_count:
        table.move_cursor(row=min(row, table.row_count - 1), scroll=False)


def _heading(column: str) -> Text:
    return Text(column.strip(), justify="right" if column.startswith(" ") else "left")


def _aligned(cell: Cell, column: str) -> Text:
    """As text, never as markup: names are of whoever asks."""
    if isinstance(cell, Text):
        return cell
    return Text(cell, justify="right" if column.startswith(" ") else "left", no_wrap=True)


def _duty(worker: WorkerFigures) -> Text:
    styles = {"serving": "green", "silent": "bold red"}
    return Text(worker.duty, style=styles.get(worker.duty, "yellow"))


def _bar(num_pages: int, num_held: int, num_shared: int, num_cached: int) -> Text:
    bar = Text()
    for num, character, style in ((num_held, "█", "cyan"), (num_shared, "▓", "cyan"), (num_cached, "▒", "blue")):
        bar.append(character * round(_BAR_CHARS * num / max(1, num_pages)), style)
    bar.truncate(_BAR_CHARS)
    bar.append("·" * (_BAR_CHARS - len(bar)), "bright_black")
    return bar


def _rate(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.1f}"


def _milliseconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.1f}"


def _window(window_s: float | None) -> str:
    return "since the start" if window_s is None else f"of the last {window_s:.0f} s"
