"""A pull as a test asks for it: what it tells is kept, and a refusal is one line that gives no secret away."""

from pathlib import Path

import pytest

from weir.model.errors import PullError
from weir.model.files.catalog import PullProgress
from weir.model.files.hub_reference import parse_hub_reference
from weir.model.hub.pull import PullPlan, PullWatch, pull_from_hub
from weir.model.hub.repository import Hub


class Watching:
    def __init__(self) -> None:
        self.plans: list[PullPlan] = []
        self.progress: list[PullProgress] = []


def pull(hub: Hub, name: str, watching: Watching | None = None) -> Path:
    seen = watching or Watching()
    return pull_from_hub(parse_hub_reference(name), hub, PullWatch(seen.plans.append, seen.progress.append))


def refusal(hub: Hub, name: str) -> str:
    with pytest.raises(PullError) as refused:
        pull(hub, name)
    message = str(refused.value)
    assert "\n" not in message
    assert "X-Amz-Signature" not in message
    return message
