"""The models of a file that a gateway follows: what it serves then, and what a wrong file changes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from weir.core.errors import NotFound
from weir_gateway.config import GatewayConfig
from weir_gateway.requests.model_follower import ModelFollower, open_requests
from weir_gateway.requests.models import ModelDirectory, ServedModel

TINY = 'load = "dummy"\nmodel_shape = "tiny"\n'


def write(path: Path, text: str) -> None:
    path.write_text(text)


def add(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def remove(path: Path) -> None:
    path.unlink()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - a file is followed
            await asyncio.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "models.toml"


@pytest.fixture
async def followed(path: Path) -> AsyncIterator[tuple[ModelFollower, ModelDirectory]]:
    write(path, f"[models.one]\n{TINY}aliases = ['uno']\n")
    follower = ModelFollower(GatewayConfig(models_file=str(path), prefix_hints=False), look_s=0.01)
    models = ModelDirectory(follower.load())
    following = asyncio.create_task(follower.follow(models, nothing))
    yield follower, models
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


async def nothing(models: Sequence[ServedModel]) -> None:
    """Needs no preparation."""


def names(models: ModelDirectory) -> list[str]:
    return [model.name for model in models.list_models()]


async def test_models_come_and_go_with_the_file(path: Path, followed: tuple[ModelFollower, ModelDirectory]) -> None:
    _, models = followed
    one = models.find("uno", "model")
    assert (one.name, models.find("", "model")) == ("one", one)
    add(path, f"[models.two]\n{TINY}")
    await until(lambda: names(models) == ["one", "two"])
    assert models.find("one", "model") is one, "what is served already is not read again"
    with pytest.raises(NotFound, match="model: no name is not served here; one of one, two, uno is"):
        models.find("", "model")
    write(path, f"[models.two]\n{TINY}")
    await until(lambda: names(models) == ["two"])
    with pytest.raises(NotFound, match="'uno' is not served here; one of two is"):
        models.find("uno", "model")


async def test_a_model_is_prepared_before_it_is_served(path: Path) -> None:
    write(path, f"[models.one]\n{TINY}")
    follower = ModelFollower(GatewayConfig(models_file=str(path), prefix_hints=False), look_s=0.01)
    models, prepared = ModelDirectory(follower.load()), list[tuple[list[str], list[str]]]()

    async def prepare(found: Sequence[ServedModel]) -> None:
        prepared.append(([model.name for model in found], names(models)))

    following = asyncio.create_task(follower.follow(models, prepare))
    add(path, f"[models.two]\n{TINY}")
    await until(lambda: names(models) == ["one", "two"])
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    assert prepared == [(["one", "two"], ["one"])]


async def test_a_wrong_file_takes_nothing_away_and_is_counted(
    path: Path, followed: tuple[ModelFollower, ModelDirectory]
) -> None:
    follower, models = followed
    for number, text in enumerate(("[models.one", "[models.one]\nspeed = 1"), start=1):
        write(path, text)
        await until(lambda number=number: follower.num_errors == number)  # type: ignore[misc]
        assert names(models) == ["one"]
    remove(path)
    await until(lambda: follower.num_errors == 3)
    write(path, f"[models.two]\n{TINY}")
    await until(lambda: names(models) == ["two"])


async def test_a_model_that_cannot_be_read_leaves_the_others(
    path: Path, followed: tuple[ModelFollower, ModelDirectory]
) -> None:
    follower, models = followed
    add(path, '[models.two]\nmodel = "no/such/model.gguf"\n')
    await until(lambda: follower.num_errors == 1)
    assert names(models) == ["one"]


def test_open_requests_are_shown_of_what_is_served_and_of_what_went() -> None:
    shown = open_requests(ModelDirectory([]), ["gone", "gone"])
    assert shown == {'model_open_requests{model="gone"}': 2.0}
