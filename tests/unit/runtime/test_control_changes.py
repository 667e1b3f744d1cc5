"""Models that are added or taken away through the supervisor's socket stand in its log of changes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from weir.core.errors import NotFound, Unavailable
from weir.runtime.change_log import ChangeLog
from weir.runtime.stack.control import ask_supervisor, serve_control
from weir.runtime.stack.model_changes import Removal
from weir.runtime.stack.models import StackModel


class FakeChanges:
    async def add(self, model: StackModel) -> None:
        if model.name == "late":
            raise Unavailable("it runs, but gateway-0 does not serve it")

    async def remove(self, name: str, timeout_s: float) -> Removal:
        if name != "fast":
            raise NotFound("model", f"no model {name!r} is served here")
        return Removal(name, 0)


async def test_each_stands_there_with_what_came_of_it(tmp_path: Path) -> None:
    log, socket = ChangeLog(tmp_path / "changes-supervisor.jsonl", "supervisor"), tmp_path / "s"
    async with serve_control(socket, cast("Any", FakeChanges()), log):
        add = {"do": "add", "model": asdict(StackModel(name="fast", model="smollm2-135m"))}
        assert (await ask_supervisor(socket, add, 10))["error"] == ""
        assert (await ask_supervisor(socket, {"do": "remove", "name": "fast", "timeout_s": 1}, 10))["name"] == "fast"
        for refused in (
            {"do": "add", "model": asdict(StackModel(name="late"))},
            {"do": "remove", "name": "other", "timeout_s": 1},
            {"do": "drop everything"},
        ):
            with pytest.raises(Unavailable):
                await ask_supervisor(socket, refused, 10)
    lines = [json.loads(line) for line in (tmp_path / "changes-supervisor.jsonl").read_text().splitlines()]
    assert [(line["actor"], line["action"], line["object"], line["result"]) for line in lines] == [
        ("here", "add model", "fast", "done"),
        ("here", "remove model", "fast", "done"),
        ("here", "add model", "late", "uncertain"),
        ("here", "remove model", "other", "refused"),
    ]
    assert lines[0]["after"].startswith("smollm2-135m")
