"""Sweeps: points that are kept and taken up again, servers in turns, and the picture of all."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from weir.bench.serving.config import LoadConfig
from weir.bench.serving.curves import page, pictures
from weir.bench.serving.datasets import TraceReplay
from weir.bench.serving.figures import NO_TARGETS, more_figures, summarize
from weir.bench.serving.records import Point, ServedRequest, ServerCurve
from weir.bench.serving.serve import Run
from weir.bench.serving.sweep import Server, Sweep, draw, main, parse_values, read_curves, try_read, write_point


def sweep_of(folder: Path, **load: object) -> Sweep:
    servers = (Server("a", "http://127.0.0.1:1"), Server("b", "grpc://127.0.0.1:1", "other"))
    config = replace(LoadConfig("http://x", "m", num_prompts=3), **load)  # type: ignore[arg-type]
    return Sweep(Run(config), servers, "request_rate", (1.0, 2.5), folder)


def point_at(value: float, *, num_failed: int = 0) -> Point:
    done = [ServedRequest(9, 0.0, 0.1 * value, [0.05, 0.05], 0.1 * value + 0.1, 3) for _ in range(4)]
    records = done + [ServedRequest(9, 0.0, error="HTTP 503")] * num_failed
    return Point(value, {**summarize(records, 4 / value), **more_figures(records, 4 / value, NO_TARGETS)})


def keep(sweep: Sweep, server: Server, value: float) -> None:
    """As a run that measured it did."""
    write_point(sweep, server, value, point_at(value))


def test_a_server_is_asked_by_its_url_over_its_protocol_for_its_model() -> None:
    load = LoadConfig("http://x", "m", endpoint="/v2/completions")
    over_grpc = Server.parse("b=grpc://10.0.0.1:50051#other").asked(load)
    assert (over_grpc.base_url, over_grpc.backend, over_grpc.model) == ("10.0.0.1:50051", "grpc", "other")
    over_http = Server.parse("a=http://10.0.0.2:8000").asked(load)
    assert (over_http.base_url, over_http.backend, over_http.model) == ("http://10.0.0.2:8000", "openai", "m")
    assert over_http.path == "/v2/completions"
    chat = replace(load, backend="openai-chat")
    assert Server.parse("b=grpc://h:1").asked(chat).backend == "grpc-chat"
    assert Server.parse("a=http://h:1").asked(replace(load, backend="grpc-chat", endpoint="")).backend == "openai-chat"


@pytest.mark.parametrize("text", ["http://x", "a=", "a=h:1", "=http://x", "a/b=http://x", "a b=http://x"])
def test_a_server_that_cannot_be_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="must be NAME=URL"):
        Server.parse(text)


@pytest.mark.parametrize("text", ["", "1,", "0", "-1", "inf", "1,x"])
def test_values_that_cannot_be_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="sweep-request-rates"):
        parse_values("sweep-request-rates", text, is_whole=False)
    assert parse_values("x", "1,2.5", is_whole=False) == (1.0, 2.5)
    with pytest.raises(ValueError, match=r"'2\.5' must be a whole number"):
        parse_values("x", "1,2.5", is_whole=True)


def test_a_point_that_is_there_is_read_and_one_of_another_load_is_refused(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    server = sweep.servers[0]
    assert try_read(sweep, server, 1.0) is None
    keep(sweep, server, 1.0)
    found = try_read(sweep, server, 1.0)
    assert found is not None
    assert dict(found.figures) == dict(point_at(1.0).figures)
    with pytest.raises(ValueError, match=r"a-request-rate-1\.json is of another load \(num_prompts, seed\)"):
        try_read(sweep_of(tmp_path, num_prompts=4, seed=1), server, 1.0)
    assert try_read(sweep_of(tmp_path, api_keys={"": "another-key"}), server, 1.0) is not None
    sweep.file_of(server, 1.0).write_text('{"form": 1')
    with pytest.raises(ValueError, match="is no point of a sweep"):
        try_read(sweep, server, 1.0)


def test_a_key_is_in_no_file_of_a_sweep(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, api_keys={"": "secret"}, headers={"x-key": "secret"})
    keep(sweep, sweep.servers[0], 1.0)
    assert "secret" not in sweep.file_of(sweep.servers[0], 1.0).read_text()


def test_what_is_measured_already_is_not_asked_again_and_what_nobody_served_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(tmp_path, dataset=LoadConfig("", "").dataset)
    for value in sweep.values:
        keep(sweep, sweep.servers[0], value)
    assert main(replace(sweep, servers=sweep.servers[:1]), json_output=False) == 0
    shown = capsys.readouterr()
    assert "0 points to measure of 2" in shown.err
    assert "curve.html" in shown.out
    assert main(sweep, json_output=True) == 1
    shown = capsys.readouterr()
    assert "2 points to measure of 4" in shown.err
    assert "b at 2.5: nothing was served; it is not kept" in shown.err
    assert [len(points) for points in json.loads(shown.out).values()] == [2, 0]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["a-request-rate-1.json", "a-request-rate-2.5.json"]


def test_the_picture_holds_every_server_and_the_page_loads_nothing(tmp_path: Path) -> None:
    failing = Point(4.0, point_at(4.0, num_failed=2).figures)
    curves = [
        ServerCurve("weir", (point_at(1.0), point_at(2.0))),
        ServerCurve("<peer>", (failing,)),
        ServerCurve("none", ()),
    ]
    drawn = pictures(curves, "request_rate")
    assert drawn.png.startswith(b"\x89PNG")
    html = page(curves, "request_rate", drawn.svg)
    assert "&lt;peer&gt;" in html
    assert "<peer>" not in html
    assert html.count("<tr>") == 4
    assert '<td class="failed">2</td>' in html
    assert re.findall(r"<script|<link|<img|@import|src=|url\(\s*['\"]?http", html) == []
    assert draw([ServerCurve("none", ())], sweep_of(tmp_path)) == []


def test_curves_are_by_rising_value_whatever_the_order_they_were_measured_in(tmp_path: Path) -> None:
    sweep = replace(sweep_of(tmp_path), values=(8.0, 1.0))
    for value in sweep.values:
        keep(sweep, sweep.servers[0], value)
    assert [[point.value for point in curve.points] for curve in read_curves(sweep)] == [[1.0, 8.0], []]


def test_a_sweep_that_cannot_be_is_named(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    with pytest.raises(ValueError, match="each name once"):
        replace(sweep, servers=(sweep.servers[0], sweep.servers[0]))
    with pytest.raises(ValueError, match="each once"):
        replace(sweep, values=(1.0, 1.0))
    with pytest.raises(ValueError, match="the trace has times of its own"):
        sweep_of(tmp_path, dataset=TraceReplay(tmp_path))
