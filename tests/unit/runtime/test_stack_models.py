"""The tables of models and groups in a stack's TOML file, and the processes that come of them."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from weir.kv.arena.segment import segment_path, segment_paths
from weir.runtime.config import ConfigError
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.models import StackModel, StackModels, format_models, models_from_document, parse_models
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.plan import ProcessSpec, plan_stack

TWO = """
[models.exact]
model = "smollm2-135m"
precision = "fp32"
decode = 2

[models.quick]
model = "org/name"
aliases = ["gpt-small"]

[groups.fast]
lanes = ["interactive"]
models = ["gpt-small"]
"""


def read(text: str, default: StackModel | None = None) -> StackModels:
    return models_from_document(tomllib.loads(text), default or StackModel(), "stack.toml")


def flag(spec: ProcessSpec, name: str) -> str | None:
    command = list(spec.command)
    return command[command.index(f"--{name}") + 1] if f"--{name}" in command else None


def specs_of(config: StackConfig, models: StackModels) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in plan_stack(config, 4222, models=models).specs}


def test_without_tables_a_stack_is_what_its_settings_say(tmp_path: Path) -> None:
    config = StackConfig(prefill=2, precision="fp32", runtime_dir=tmp_path)
    models = read("", config.default_model)
    assert models.models == (config.default_model,)
    specs = plan_stack(config, 4222, models=models).specs
    assert [spec.command for spec in specs] == [spec.command for spec in plan_stack(config, 4222).specs]
    names = ["nats", "transfer-0", "scheduler-0", "prefill-0", "prefill-1", "decode-0", "gateway-0"]
    assert [spec.name for spec in specs] == names
    assert all(flag(spec, "served-model-name") is None and not spec.model for spec in specs)


def test_each_model_has_an_arena_and_workers_of_its_own(tmp_path: Path) -> None:
    specs = specs_of(StackConfig(runtime_dir=tmp_path), read(TWO))
    assert Counter(spec.role for spec in specs.values())["decode"] == 4
    for name, model, group in (
        ("transfer-0", "exact", None),
        ("decode-0", "exact", None),
        ("decode-1", "exact", None),
        ("decode-2", "quick", None),
        ("decode-3", "quick", "fast"),
        ("prefill-2", "quick", "fast"),
    ):
        assert (specs[name].model, flag(specs[name], "served-model-name")) == (model, model)
        assert flag(specs[name], "group") == group
    assert (flag(specs["decode-0"], "precision"), flag(specs["decode-3"], "precision")) == ("fp32", "auto")
    sockets = {flag(specs[f"decode-{number}"], "arena-socket") for number in (2, 3)}
    listens = {name: flag(specs[name], "listen") for name in ("transfer-0", "transfer-1")}
    assert {f"unix:{socket}" for socket in sockets} == {listens["transfer-1"]} != {listens["transfer-0"]}
    assert flag(specs["scheduler-0"], "lane-groups") == "interactive=fast"
    assert flag(specs["transfer-1"], "models-on-machine") == "2"


def test_tables_leave_out_what_the_stack_says() -> None:
    default = StackModel(model="other", precision="int8", prefill=2, arena_bytes=5, aliases=("never",))
    [model] = read("[models.one]", default).models
    assert model == StackModel("one", model="one", precision="int8", prefill=2, arena_bytes=5)


def test_a_chat_template_is_of_the_model_that_it_was_given_for() -> None:
    default = StackModel(chat_template="hermes", tool_format="hermes", reasoning_format="none")
    [own, other] = read('[models.own]\nchat_template = "/a.jinja"\n[models.other]', default).models
    assert (own.chat_template, own.tool_format) == ("/a.jinja", "auto")
    assert (other.chat_template, other.tool_format, other.reasoning_format) == ("", "auto", "auto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = 1", "stack.toml: models: must be tables, each begun with [models.NAME]"),
        ("[models]\na = 1", "stack.toml: models.a: must be a table"),
        ("[models.a]\nspeed = 1", "stack.toml: models.a.speed: there is no such setting; known are model"),
        ("[models.a]\nprecision = 'x'", "stack.toml: models.a.precision = 'x': must be one of auto, int8"),
        ("[models.a]\ndecode = -1", "stack.toml: models.a.decode -1: must be in [0, 64]"),
        ("[models.a]\naliases = ['b']\n[models.b]", "'b': is a name of models.a, models.b, 2 times"),
        ("[models.a]\naliases = ['b', 'b']", "models.a.aliases 'b': is a name of models.a, 2 times"),
        ("[models.a]\naliases = ['b c']", "models.a.name 'b c': must be 1 to 96 of"),
        ("[groups.Fast]", "groups.Fast.name 'Fast': must be 1 to 32 of a-z 0-9 _ -"),
        ("[groups.fast]\ndecode = 0", "groups.fast.decode 0: prefill is 1, and nobody would go on"),
        ("[groups.fast]\nprefill = 0\ndecode = 0", "groups.fast: has no worker: decode is 0; set it to 1 or more"),
        ("[models.a]\n[groups.fast]\nmodels = ['b']", "groups.fast.models 'b': is none of a"),
        ("[groups.x]\nlanes = ['l']\n[groups.y]\nlanes = ['l']", "groups.y.lanes 'l': is of groups.x too"),
        ("\n".join(f"[models.m{number}]" for number in range(17)), "models: 17, must be in [1, 16]"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(text)
    assert message in raised.value.message
    assert raised.value.message.startswith("stack.toml: ")


@pytest.mark.parametrize(
    ("text", "lanes", "message"),
    [
        (TWO, {"standard": ""}, "groups.fast.lanes 'interactive': is none of the lanes standard"),
        ("[groups.fast]", {"standard": ""}, "groups.fast 'fast': no lane has this group"),
        ("[models.a]\ngroup = 'own'", {"standard": ""}, "models.a.group 'own': no lane has this group"),
    ],
)
def test_a_group_that_no_lane_has_is_refused(text: str, lanes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=r"^groups|^models") as raised:
        read(text).check_lanes(lanes)
    assert message in str(raised.value)


def test_lanes_of_the_limits_file_may_name_a_group() -> None:
    read("[models.a]\ngroup = 'own'").check_lanes({"standard": "own"})


def test_the_file_of_gateways_says_the_same_models() -> None:
    models = (*read(TWO).models, StackModel(name="third", exact=True, aliases=('a"b'.replace('"', "."),)))
    assert parse_models(format_models(models), StackModel(), "models.toml") == models
    assert parse_models(format_models((StackModel(),)), StackModel(), "models.toml") == (StackModel(),)


def test_what_a_devices_arithmetic_is_not_is_refused(tmp_path: Path) -> None:
    models = StackModels((StackModel("a", precision="bf16"),))
    with pytest.raises(ValueError, match=r"models\.a\.precision"):
        plan_stack(StackConfig(runtime_dir=tmp_path), 4222, models=models)


def test_a_start_removes_what_all_models_have_left(tmp_path: Path) -> None:
    for index in (0, 1, 12):
        segment_path("mine", tmp_path, index).touch()
    for other in ("weir-mine-arena-x", "weir-mine2-arena-1"):
        (tmp_path / other).touch()
    assert segment_paths("mine", tmp_path) == tuple(segment_path("mine", tmp_path, index) for index in (0, 1, 12))
    paths = InstancePaths(tmp_path / "mine")
    paths.make()
    paths.make_arena_folder(3)
    paths.models_file.touch()
    paths.remove_volatile()
    assert sorted(path.name for path in paths.folder.iterdir()) == ["logs"]
