"""Models that come and go while a stack runs.

add     arena and workers start ──> all are ready ──> models file ──> every gateway serves it
remove  models file ──> gateways refuse it, and have no request of it left ──> workers end ──> arena ends
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from weir.core.clock import SystemClock
from weir.core.errors import AlreadyExists, FieldViolation, InvalidRequest, NotFound, Unavailable
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.models import MAX_MODELS, StackModel, StackModels, check_names, format_models
from weir.runtime.stack.observe import try_describe
from weir.runtime.stack.plan import ProcessSpec, plan_model, with_metrics
from weir.runtime.stack.processes import is_running
from weir.runtime.stack.state import Phase, ProcessState

MODEL_ROLES = ("transfer", "prefill", "decode")
_POLL_S = 0.2
_GATEWAYS_S = 120.0
"""In which gateways have to read a model's tokenizer and weights' digest."""


def open_requests_metric(name: str) -> str:
    """Of a gateway: it has this figure of each model that it serves or has requests of."""
    return f'model_open_requests{{model="{name}"}}'


class Processes(Protocol):
    """Those of a running stack."""

    @property
    def phase(self) -> Phase: ...

    @property
    def states(self) -> Sequence[ProcessState]: ...

    async def start_more(self, specs: Sequence[ProcessSpec]) -> None:
        """Returns when all are ready. Raises WeirError, and none of them is left."""
        ...

    async def end_some(self, names: Sequence[str]) -> None:
        """In an orderly way, and for good."""
        ...


@dataclass(frozen=True, slots=True)
class Removal:
    """`num_open`: requests that had not ended in time, which fail now."""

    name: str
    num_open: int


class ModelChanges:
    """One change at a time: for who holds a lock."""

    def __init__(
        self,
        config: StackConfig,
        models: StackModels,
        nats_url: str,
        processes: Processes,
        hold_ports: Callable[[int, ExitStack], Sequence[int]],
    ) -> None:
        """`hold_ports`: so many free ports, held until the stack is closed. Raises WeirError."""
        self._config = config
        self._models = models.models
        self._groups = models.groups
        self._nats_url = nats_url
        self._processes = processes
        self._hold_ports = hold_ports
        self._held: dict[str, ExitStack] = {}
        """Ports of a model that was added."""
        self._numbers: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        return [served_name(model) for model in self._models]

    async def add(self, model: StackModel) -> None:
        """Returns when every gateway serves it. Raises WeirError; what was started for it has ended then, unless it is
        a gateway alone that is late."""
        self._check_ready()
        self._check_new(model)
        # The groups of all models are of this one too.
        groups = tuple(replace(group, models=()) for group in self._groups if group.has(model))
        own = StackModels((model,), groups)
        if not self._numbers:
            self._numbers.update(state.role for state in self._processes.states)
        held = ExitStack()
        try:
            number = self._numbers["transfer"]
            specs = plan_model(self._config, self._nats_url, model, own, self._numbers)
            specs = with_metrics(specs, self._hold_ports(len(specs), held))
            self._config.paths.make_arena_folder(number)
            await self._processes.start_more(specs)
        except BaseException:
            held.close()
            raise
        self._held[model.name] = held
        self._set((*self._models, model))
        late = await self._wait_gateways(model.name, "serve")
        if late:
            raise Unavailable(f"{model.name} runs, but {late} does not serve it after {_GATEWAYS_S:g} s; see its log")

    async def remove(self, name: str, timeout_s: float) -> Removal:
        """Waits `timeout_s` for its requests to end. Raises NotFound, InvalidRequest for the last one, Unavailable."""
        self._check_ready()
        model = next((one for one in self._models if name in (served_name(one), *one.aliases)), None)
        if model is None:
            raise NotFound("model", f"no model {name!r} is served here; there are: {', '.join(self.names)}")
        if len(self._models) == 1:
            raise InvalidRequest([FieldViolation("model", f"{name} is the only one: `weir down` ends the stack")])
        shown = served_name(model)
        self._set(tuple(one for one in self._models if one is not model))
        await self._wait_gateways(shown, "be rid of", timeout_s)
        num_open = sum([await self._num_open(state, shown) or 0 for state in self._gateways()])
        ending = [one.name for one in self._processes.states if one.role in MODEL_ROLES and one.model == model.name]
        await self._processes.end_some(ending)
        held = self._held.pop(model.name, None)
        if held is not None:
            held.close()
        return Removal(shown, num_open)

    def _check_ready(self) -> None:
        if self._processes.phase != "ready":
            raise Unavailable(f"the stack is {self._processes.phase}: models change in one that is ready")

    def _check_new(self, model: StackModel) -> None:
        """Raises InvalidRequest, AlreadyExists."""
        if not model.name:
            raise InvalidRequest([FieldViolation("name", "is empty: say what requests call it")])
        if len(self._models) >= MAX_MODELS:
            raise InvalidRequest(
                [FieldViolation("models", f"{len(self._models)} are served, at most {MAX_MODELS} can be")]
            )
        named = [replace(one, name=served_name(one)) if _is_plain(served_name(one)) else one for one in self._models]
        try:
            check_names([*named, model])
        except ValueError as error:
            raise AlreadyExists("model", str(error)) from error

    def _set(self, models: tuple[StackModel, ...]) -> None:
        self._models = models
        write_models(self._config.paths.models_file, models)

    def _gateways(self) -> list[ProcessState]:
        return [state for state in self._processes.states if state.role == "gateway"]

    async def _wait_gateways(
        self, name: str, wanted: Literal["serve", "be rid of"], timeout_s: float = _GATEWAYS_S
    ) -> str:
        """Those that are late, as words; empty: none is."""
        clock = SystemClock()
        deadline_s = clock.now_s() + timeout_s
        while True:
            late = []
            for state in self._gateways():
                num_open = await self._num_open(state, name)
                if (num_open is None) == (wanted == "serve"):
                    late.append(state.name)
            if not late or clock.now_s() > deadline_s or self._processes.phase != "ready":
                return ", ".join(late)
            await asyncio.sleep(_POLL_S)

    async def _num_open(self, gateway: ProcessState, name: str) -> int | None:
        """Requests of a model that it has; None: it does not serve it, or does not answer."""
        if gateway.identity is None or not is_running(gateway.identity) or not gateway.address:
            return None  # somebody else may listen there, and is not to get the key
        described = await try_describe(gateway, self._config.paths.try_read_admin_key() or "")
        value = None if described is None else dict(described.metrics).get(open_requests_metric(name))
        return None if value is None else int(value)


def served_name(model: StackModel) -> str:
    """What it is called where no name was given too."""
    if model.name:
        return model.name
    try:
        return resolve_model(model.reference).name
    except ModelError:  # its files went after the start
        return model.model


def _is_plain(name: str) -> bool:
    try:
        StackModel(name=name)
    except ValueError:
        return False
    return True


def write_models(path: Path, models: Sequence[StackModel]) -> None:
    """Replaces the file as a whole: gateways see the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(format_models(models))
    unfinished.replace(path)
