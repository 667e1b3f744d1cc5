"""Which models a gateway serves: the one of its settings, or those of a file that it follows while it runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Never

from weir.core.errors import WeirError
from weir.model.errors import ModelError
from weir.runtime.config import ConfigError
from weir.runtime.stack.models import StackModel, parse_models
from weir_gateway.config import GatewayConfig
from weir_gateway.requests.models import ModelDirectory, ServedModel, load_model_of, load_served_model

logger = logging.getLogger(__name__)

PrepareModels = Callable[[Sequence[ServedModel]], Awaitable[None]]

_LOOK_S = 0.25
_MAX_FILE_BYTES = 1 << 20


class ModelFollower:
    """Loads what is new, and keeps what it has loaded. `look_s`: between two looks at the file."""

    def __init__(self, config: GatewayConfig, look_s: float = _LOOK_S) -> None:
        self._config = config
        self._path = Path(config.models_file) if config.models_file else None
        self._look_s = look_s
        self._default = StackModel(
            precision=config.precision, exact=config.exact, max_context_tokens=config.max_context_tokens
        )
        self._loaded: dict[StackModel, ServedModel] = {}
        self._seen: bytes = b""
        self.num_errors = 0

    def load(self) -> list[ServedModel]:
        """At the start. Blocks. Raises ModelError, ConfigError."""
        if self._path is None:
            return [load_model_of(self._config)]
        self._seen = _read(self._path)
        return self._load(self._seen)

    async def follow(self, models: ModelDirectory, prepare: PrepareModels) -> Never:
        """Runs until it is cancelled. A file that is wrong changes nothing, and is counted once. `prepare`: what is to
        be served, before it is."""
        while True:
            await asyncio.sleep(self._look_s)
            if self._path is None:
                continue
            try:
                text = await asyncio.to_thread(_read, self._path)
                if text == self._seen:
                    continue
                self._seen = text
                await self._take(text, models, prepare)
            except (WeirError, ModelError, OSError) as error:
                self._report(error)
            except Exception as error:  # noqa: BLE001 - the boundary of a task that nobody awaits
                self._report(error)

    async def _take(self, text: bytes, models: ModelDirectory, prepare: PrepareModels) -> None:
        """What went goes at once; what is new comes when it is loaded."""
        wanted = self._parse(text)
        models.replace_all([self._loaded[one] for one in wanted if one in self._loaded])
        loaded = await asyncio.to_thread(self._load, text)
        await prepare(loaded)
        models.replace_all(loaded)
        logger.info("serves %s", ", ".join(model.name for model in models.list_models()) or "no model")

    def _report(self, error: Exception) -> None:
        if isinstance(error, OSError) and not self._seen:
            return
        if isinstance(error, OSError):
            self._seen = b""  # reported once, and read again when it is back
        self.num_errors += 1
        logger.error("%s: %s; those that were loaded stay", self._path, error)

    def _parse(self, text: bytes) -> tuple[StackModel, ...]:
        return parse_models(text.decode("utf-8", "replace"), self._default, str(self._path))

    def _load(self, text: bytes) -> list[ServedModel]:
        wanted = self._parse(text)
        self._loaded = {one: self._loaded.get(one) or self._load_one(one) for one in wanted}
        return list(self._loaded.values())

    def _load_one(self, model: StackModel) -> ServedModel:
        return load_served_model(
            model.reference,
            model.max_context_tokens,
            model.precision if self._config.prefix_hints else None,
            self._config.device,
            is_exact=model.exact,
            served_name=model.name,
            aliases=model.aliases,
            chat_template=model.chat_template,
            tool_format=model.tool_format,
            reasoning_format=model.reasoning_format,
        )


def _read(path: Path) -> bytes:
    """Raises ConfigError, OSError."""
    with path.open("rb") as file:
        text = file.read(_MAX_FILE_BYTES + 1)
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigError(f"models_file {path}: over {_MAX_FILE_BYTES} bytes")
    return text


def open_requests(models: ModelDirectory, open_models: Iterable[str]) -> dict[str, float]:
    """`open_models`: of each request that has not ended, its model. Names such as `model_open_requests{model="NAME"}`:
    of each model that is served, or still has requests."""
    counts = {model.name: 0.0 for model in models.list_models()}
    for name in open_models:
        counts[name] = counts.get(name, 0.0) + 1
    return {f'model_open_requests{{model="{name}"}}': count for name, count in counts.items()}
