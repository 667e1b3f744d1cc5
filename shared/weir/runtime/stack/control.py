"""What a running supervisor is asked by this user's commands: one JSON line each way, over a Unix socket in the
instance's folder, which is this user's alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

from weir.core.errors import FieldViolation, InvalidRequest, Unavailable, WeirError
from weir.core.fields import parse_toml
from weir.runtime.change_log import HERE, ChangeLog, Told, new_correlation_id
from weir.runtime.stack.model_changes import ModelChanges
from weir.runtime.stack.models import StackModel

_MAX_LINE_BYTES = 64 * 1024
_READ_S = 10.0
_MAX_CALLS = 16


@asynccontextmanager
async def serve_control(path: Path, changes: ModelChanges, log: ChangeLog) -> AsyncIterator[None]:
    """Answers until it is left; what is under way then is broken off. `log` hears what was changed."""
    service = _Control(changes, log)
    server = await asyncio.start_unix_server(service.on_call, path, limit=_MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        await service.close()


class _Control:
    def __init__(self, changes: ModelChanges, log: ChangeLog) -> None:
        self._changes = changes
        self._log = log
        self._changing = asyncio.Lock()
        self._calls: set[asyncio.Task[Any]] = set()

    async def on_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._calls) >= _MAX_CALLS:
            writer.close()
            return
        self._calls.add(task)
        try:
            answer = await self._answer(reader)
            writer.write(json.dumps(answer).encode() + b"\n")
            with suppress(ConnectionError):  # who asked has gone
                await writer.drain()
        finally:
            self._calls.discard(task)
            writer.close()

    async def close(self) -> None:
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_READ_S):
                line = await reader.readline()
            request = json.loads(line)
            if self._changing.locked():
                raise Unavailable("another change of models is under way; try again when it is done")
            async with self._changing:
                return {"error": "", **await self._change(request)}
        except (ValueError, KeyError, TypeError, TimeoutError) as error:
            return {"error": f"not understood: {type(error).__name__}: {error}"}
        except (WeirError, OSError) as error:
            return {"error": str(error)}

    async def _change(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "add":
                model = model_from_json(request["model"])
                async with self._logged("add model", model.name, after=f"{model.model} {model.precision}".strip()):
                    await self._changes.add(model)
                return {}
            case "remove":
                name, timeout_s = str(request["name"]), float(request["timeout_s"])
                async with self._logged("remove model", name):
                    return asdict(await self._changes.remove(name, timeout_s))
            case other:
                raise InvalidRequest([FieldViolation("do", f"{other!r}: must be add or remove")])

    @asynccontextmanager
    async def _logged(self, action: str, name: str, after: str = "") -> AsyncIterator[None]:
        """Only this user's commands reach the socket."""
        correlation_id = new_correlation_id()
        try:
            yield
        except WeirError as error:
            self._log.write_failure(HERE, action, [name], error, correlation_id)
            raise
        self._log.write_all(HERE, action, [Told(name, after=after)], correlation_id)


def model_from_json(fields: Mapping[str, Any]) -> StackModel:
    """Raises ValueError, TypeError."""
    hints = get_type_hints(StackModel, include_extras=True)
    return StackModel(**{name: parse_toml(hints[name], value) for name, value in fields.items()})


async def ask_supervisor(path: Path, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """The answer of the supervisor that listens at `path`. Raises Unavailable, also with what it refuses."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path, limit=_MAX_LINE_BYTES)
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
            finally:
                writer.close()
    except TimeoutError:
        raise Unavailable(
            f"no answer of the supervisor within {timeout_s:g} s; `weir status` shows what runs"
        ) from None
    except OSError as error:
        raise Unavailable(f"no supervisor of this version listens at {path} ({error})") from error
    if not line:
        raise Unavailable("the supervisor ended, or had too many calls, before it answered")
    answer: dict[str, Any] = json.loads(line)
    if answer["error"]:
        raise Unavailable(answer["error"])
    return answer
