"""Several models in one stack, and workers that lanes have to themselves: the tables `[models.NAME]` and
`[groups.NAME]` of the TOML file."""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_type_hints

from weir.core.device import Precision
from weir.core.fields import ByteSize, check_range, describe_type, parse_toml
from weir.runtime.config import ConfigError, check_load, model_reference

MODELS_TABLE = "models"
GROUPS_TABLE = "groups"
MAX_WORKERS = 64
"""Of a role, of one model."""
MAX_MODELS = 16
ToolFormatName = Literal["auto", "hermes", "llama3_json", "mistral_list", "mistral_named", "qwen3_coder", "phi4_mini"]
ReasoningFormatName = Literal["auto", "think", "none"]
REASONING_FORMAT_HELP = (
    "How the model marks its reasoning. `think`: `<think>` and `</think>`; `none`: not at all, all that it writes is "
    "content; `auto`: found in its chat template."
)
TOOL_FORMAT_HELP = "Form in which the model writes calls of tools. `auto`: found in its chat template."
CHAT_TEMPLATE_HELP = (
    "Chat template in place of the model's own: a file of Jinja, or hermes (ChatML with tools). Empty: its own."
)
_MAX_ALIASES = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,95}")
_GROUP = re.compile(r"[a-z0-9_-]{1,32}")


@dataclass(frozen=True)
class StackModel:
    """One model of a stack. `name`: what requests call it; empty: what its files are called.

    Raises ValueError that names the field, its value and what it must be.
    """

    name: str = ""
    model: str = "smollm2-135m"
    load: Literal["files", "dummy"] = "files"
    model_shape: str = ""
    precision: Precision = "auto"
    exact: bool = False
    prefill: int = 1
    decode: int = 1
    spares: int = 0
    """Decode workers that start drained."""
    group: str = ""
    """Of its workers: only lanes of this group have them."""
    aliases: tuple[str, ...] = ()
    """Further names for it in requests."""
    arena_bytes: ByteSize = 0
    max_context_tokens: int = 0
    chat_template: str = ""
    tool_format: ToolFormatName = "auto"
    reasoning_format: ReasoningFormatName = "auto"

    def __post_init__(self) -> None:
        for name in (*([self.name] if self.name else []), *self.aliases):
            if not _NAME.fullmatch(name):
                raise ValueError(f"name {name!r}: must be 1 to 96 of A-Z a-z 0-9 . _ : / @ - and begin with no sign")
        if len(self.aliases) > _MAX_ALIASES:
            raise ValueError(f"aliases: {len(self.aliases)}, must be at most {_MAX_ALIASES}")
        check_load(self.load, self.model_shape)
        check_range(self, "prefill", 0, MAX_WORKERS)
        check_range(self, "decode", 0, MAX_WORKERS)
        check_range(self, "spares", 0, MAX_WORKERS)
        if self.group and not _GROUP.fullmatch(self.group):
            raise ValueError(f"group {self.group!r}: must be at most 32 characters of a-z 0-9 _ -")
        for name in ("arena_bytes", "max_context_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: must not be negative")

    @property
    def reference(self) -> str:
        """What `resolve_model` takes."""
        return model_reference(self.model, self.load, self.model_shape)

    @property
    def names(self) -> tuple[str, ...]:
        """All that are said of it here."""
        return (*([self.name] if self.name else []), *self.aliases)


@dataclass(frozen=True)
class GroupConfig:
    """Workers beside the common ones, which only requests of some lanes get. `models`: of which; empty: of all.

    Raises ValueError that names the field, its value and what it must be.
    """

    name: str
    lanes: tuple[str, ...] = ()
    prefill: int = 1
    decode: int = 1
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _GROUP.fullmatch(self.name):
            raise ValueError(f"name {self.name!r}: must be 1 to 32 of a-z 0-9 _ -")
        check_range(self, "prefill", 0, MAX_WORKERS)
        check_range(self, "decode", 0, MAX_WORKERS)
        if self.prefill and not self.decode:
            raise ValueError(f"decode 0: prefill is {self.prefill}, and nobody would go on; set decode to 1 or more")

    def has(self, model: StackModel) -> bool:
        """Whether it has workers of the model."""
        return self.decode > 0 and (not self.models or bool(set(self.models).intersection(model.names)))


@dataclass(frozen=True)
class StackModels:
    """All models of a stack, and the groups beside their common workers. Raises ValueError."""

    models: tuple[StackModel, ...]
    groups: tuple[GroupConfig, ...] = ()
    lane_groups: Mapping[str, str] = field(init=False)
    """lane -> the group that it has to itself, as far as groups say so."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.models) <= MAX_MODELS:
            raise ValueError(f"models: {len(self.models)}, must be in [1, {MAX_MODELS}]")
        check_names(self.models)
        known = {name for model in self.models for name in model.names}
        lane_groups: dict[str, str] = {}
        for group in self.groups:
            for name in group.models:
                if name not in known:
                    raise ValueError(
                        f"groups.{group.name}.models {name!r}: is none of {', '.join(sorted(known)) or 'no tables'}; "
                        "leave it out for all models"
                    )
            if not any(group.has(model) or model.group == group.name for model in self.models):
                raise ValueError(
                    f"groups.{group.name}: has no worker: decode is 0; set it to 1 or more, or give a model's table "
                    f'group = "{group.name}"'
                )
            for lane in group.lanes:
                if lane_groups.setdefault(lane, group.name) != group.name:
                    other = lane_groups[lane]
                    raise ValueError(f"groups.{group.name}.lanes {lane!r}: is of groups.{other} too; a lane has one")
        object.__setattr__(self, "lane_groups", lane_groups)

    def num_workers(self, model: StackModel) -> int:
        """Of one model, in all groups."""
        own = sum(group.prefill + group.decode for group in self.groups if group.has(model))
        return model.prefill + model.decode + model.spares + own

    @property
    def num_all_workers(self) -> int:
        return sum(self.num_workers(model) for model in self.models)

    def check_lanes(self, known: Mapping[str, str]) -> None:
        """Raises ValueError. `known`: lanes, each with the group that the limits give it."""
        for lane, group in self.lane_groups.items():
            if lane not in known:
                raise ValueError(f"groups.{group}.lanes {lane!r}: is none of the lanes {', '.join(known)}")
        used = {*self.lane_groups.values(), *known.values()}
        named = {**{f"groups.{one.name}": one.name for one in self.groups}}
        named |= {f"models.{one.name}.group": one.group for one in self.models if one.group}
        for where, group in named.items():
            if group not in used:
                raise ValueError(
                    f"{where} {group!r}: no lane has this group, so its workers would get nothing; name lanes in "
                    f"groups.{group}.lanes, or set worker_group of a lane in the limits file"
                )


def check_names(models: Sequence[StackModel]) -> None:
    """Raises ValueError for a name that several have, or one has twice."""
    counts = Counter(name for model in models for name in model.names)
    for model in models:
        for name in model.names:
            if counts[name] > 1:
                whose = ", ".join(f"models.{other.name}" for other in models if name in other.names)
                where = f"models.{model.name}" if name == model.name else f"models.{model.name}.aliases"
                raise ValueError(
                    f"{where} {name!r}: is a name of {whose}, {counts[name]} times; a name means one model"
                )


def models_from_document(document: Mapping[str, Any], default: StackModel, path: str) -> StackModels:
    """What a parsed TOML file says. `default`: the model of a stack without tables, and what tables leave out.

    A table without `model` is named after it. Raises ConfigError that begins with `path`.
    """
    models = tuple(_read_models(document, default, path))
    groups = tuple(
        _read(GroupConfig(name) if _GROUP.fullmatch(name) else None, name, table, f"{path}: groups.{name}", GroupConfig)
        for name, table in _tables(document, GROUPS_TABLE, path)
    )
    try:
        return StackModels(models or (default,), groups)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_models(document: Mapping[str, Any], default: StackModel, path: str) -> Iterator[StackModel]:
    for name, table in _tables(document, MODELS_TABLE, path):
        base = replace(default, name="", model=name, aliases=(), load="files", model_shape="")
        base = replace(base, chat_template="", tool_format="auto", reasoning_format="auto")
        yield _read(base, name, table, f"{path}: models.{name}", StackModel)


def _tables(document: Mapping[str, Any], name: str, path: str) -> Iterator[tuple[str, Any]]:
    tables = document.get(name, {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: {name}: must be tables, each begun with [{name}.NAME]")
    yield from tables.items()


def _read(base: Any, name: str, table: Any, where: str, kind: type[Any]) -> Any:
    """`base` (None: the kind's defaults) with what the table says."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: must be a table")
    hints = get_type_hints(kind, include_extras=True)
    known = [entry.name for entry in fields(kind) if entry.name != "name"]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}.{key}: there is no such setting; known are {', '.join(known)}")
        try:
            values[key] = parse_toml(hints[key], value)
        except ValueError as error:
            raise ConfigError(f"{where}.{key} = {value!r}: must be {describe_type(hints[key])}") from error
    try:
        return kind(name=name, **values) if base is None else replace(base, name=name, **values)
    except ValueError as error:
        raise ConfigError(f"{where}.{error}") from error


def format_models(models: Collection[StackModel]) -> str:
    """The tables that say these models; what has its default is left out."""
    lines: list[str] = []
    for model in models:
        lines += [f"[{MODELS_TABLE}.{json.dumps(model.name)}]"]
        for entry in fields(StackModel):
            value = getattr(model, entry.name)
            if entry.name not in ("name",) and (value != entry.default or entry.name == "model"):
                shown = list(value) if isinstance(value, tuple) else value
                lines.append(f"{entry.name} = {json.dumps(shown)}")
        lines.append("")
    return "\n".join(lines)


def parse_models(text: str, default: StackModel, path: str) -> tuple[StackModel, ...]:
    """The models of a file, none if it has no tables of them. Raises ConfigError."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    models = tuple(_read_models(document, default, path))
    try:
        check_names(models)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return models
