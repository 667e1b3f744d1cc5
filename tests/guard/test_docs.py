"""What the documents say is there: files, headings, commands, options, settings, modules, make targets."""

import ast
import importlib
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.guard import documents
from tests.guard.documents import MANUALS, RECORDS, Block, Command
from tests.guard.help_texts import PROGRAM, all_commands
from tests.guard.sources import ROOT, modules
from tests.guard.test_layers import FLOORS

from weir.policy.registry import PolicySpec
from weir.runtime.config import ROLES, ServiceConfig, resolve_config
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.hosts_file import read_hosts
from weir.runtime.stack.models import StackModel, models_from_document
from weir.scheduling.limits import CoreLimits
from weir.scheduling.limits_file import parse_limits
from weir.worker.roles.kinds import KINDS

OTHER_PROGRAMS = {"cd", "curl", "docker", "git", "touch"}
OTHER_OPTIONS = {"--config", "--help", "--scale"}
"""That every program has, and of `docker compose`."""
OWN_POLICY = "longest-prompt"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
SCRIPT_BLOCKS = [block for path in MANUALS for block in documents.blocks(path) if block.language == ""]
COMMANDS = [command for block in SCRIPT_BLOCKS for command in documents.commands(block)]


def service_config(role: str) -> type[ServiceConfig]:
    if role in KINDS:
        return KINDS[role].config_type
    config: type[ServiceConfig] = getattr(importlib.import_module(f"weir_{role}.config"), f"{role.capitalize()}Config")
    return config


def settings() -> set[str]:
    """Of all services and of `weir up`."""
    kinds: list[Any] = [StackConfig, *map(service_config, ROLES)]
    return {entry.name for kind in kinds for entry in fields(kind)}


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", [*MANUALS, *RECORDS], ids=name_of)
def test_every_relative_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    broken = []
    for link in documents.links(document):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in documents.anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_index_and_every_decision_can_be_found() -> None:
    index = ROOT / "shared/docs/index.md"
    pages = {path.name for path in index.parent.glob("*.md")} - {index.name}
    assert pages - set(documents.links(index)) == set()
    numbers = [path.name[:4] for path in (ROOT / "shared/adr").glob("*.md")]
    assert len(numbers) == len(set(numbers))


def test_commands_are_found() -> None:
    programs = {Path(command.words[0]).name for command in COMMANDS if command.words}
    assert {"weir", "make", "python", "pip", "curl", "docker", "sh"} <= programs


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_is_one_that_there_is(command: Command) -> None:
    assert [name for name in command.variables if not is_variable(name)] == []
    if not command.words:
        return
    program, *rest = command.words
    match Path(program).name:
        case "weir":
            assert problem_of(rest) is None
        case "docker" if "weir" in rest:
            assert problem_of(rest[rest.index("weir") + 1 :]) is None
        case "make":
            assert {word for word in rest if "=" not in word and not word.startswith("-")} <= TARGETS
        case "python" | "python3" | "sh" | "buf" | "pytest":
            check_script(rest)
        case "pip":
            check_pip(rest)
        case other:
            assert other in OTHER_PROGRAMS


def is_variable(name: str) -> bool:
    """A setting as the environment has it, or a variable that some source reads."""
    if not name.startswith("WEIR_"):
        return True
    if name.removeprefix("WEIR_").lower() in settings():
        return True
    sources = [*modules().values(), ROOT / "Makefile", *(ROOT / "compose").iterdir()]
    return any(name in path.read_text() for path in sources if path.is_file())


def problem_of(arguments: list[str]) -> str | None:
    """What the command line program says of arguments, without doing what they ask; None: they are well."""
    command, rest, path = PROGRAM, list(arguments), "weir"
    while rest and rest[0] in getattr(command, "commands", {}):
        command, path, rest = command.commands[rest[0]], f"{path} {rest[0]}", rest[1:]
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        return f"{path}: no command {rest[0]}"
    if path == "weir serve" and rest and rest[0] in ROLES:
        known = {f"--{entry.name.replace('_', '-')}" for entry in fields(service_config(rest[0]))} | {"--help"}
        wrong = [word for word in rest[1:] if word.startswith("--") and word not in known]
        return f"{path} {rest[0]}: no options {wrong}" if wrong else None
    try:
        parsed = command.make_context(path, rest).params
    except typer.Exit:  # --help
        return None
    except Exception as error:  # noqa: BLE001 - whatever the parser raises is what a user would be told
        return f"{path}: {type(error).__name__}: {error}"
    policies = parsed.get("policy") or ()
    for policy in [policies] if isinstance(policies, str) else policies:
        if policy.partition(":")[0] != OWN_POLICY:
            PolicySpec.parse(policy)
    return None


def check_script(arguments: list[str]) -> None:
    if arguments[:1] == ["-m"]:
        assert importlib.util.find_spec(arguments[1]) is not None
        return
    paths = [word for word in arguments if "/" in word and not re.search(r"[:$]", word)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def check_pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in arguments:
        match = re.fullmatch(r"(?:\.|weir-llm)\[(.+)\]", word)
        assert match is None or set(match[1].split(",")) <= extras.keys()
        if word.startswith("./"):
            assert (ROOT / word).exists()


def test_a_wrong_command_is_noticed() -> None:
    for arguments in (["fly"], ["up", "--wings"], ["limits", "fly"], ["generate", "--n", "x"], ["pull"]):
        assert problem_of(arguments) is not None
    assert problem_of(["serve", "decode", "--wings"]) is not None
    with pytest.raises(ValueError, match="wings"):
        problem_of(["up", "--policy", "wings"])


def commands_of_help() -> Iterator[Command]:
    """The examples in the help of every command, and that of every command itself."""
    for path, examples in all_commands():
        yield from documents.parse_commands("\n".join([f"{path} --help", *examples]), f"{path} --help")


@pytest.mark.parametrize("command", list(commands_of_help()), ids=str)
def test_every_example_of_a_help_text_is_a_command_that_there_is(command: Command) -> None:
    assert [name for name in command.variables if not is_variable(name)] == []
    assert command.words[0] == "weir"
    assert problem_of(list(command.words[1:])) is None


@pytest.mark.parametrize("document", MANUALS, ids=name_of)
def test_every_command_option_and_setting_in_running_text_is_there(document: Path) -> None:
    options = {f"--{name.replace('_', '-')}" for name in settings()} | OTHER_OPTIONS | set(all_options())
    wrong = []
    for code in documents.inline_code(document):
        program, *rest = code.split() or [""]
        if program == "weir" or program.startswith("--"):
            wrong += [option for option in re.findall(r"(?<!\S)(--[a-z][a-z-]+)", code) if option not in options]
        wrong += [name for name in re.findall(r"\bWEIR_[A-Z_]+", code) if not is_variable(name)]
        if program == "weir" and rest and rest[0] not in PROGRAM.commands and not rest[0].startswith("-"):
            wrong.append(code)
        group: Any = PROGRAM.commands.get(rest[0]) if program == "weir" and rest else None
        if hasattr(group, "commands") and len(rest) > 1 and rest[1] not in group.commands:
            wrong.append(code)
        wrong += [target for target in re.findall(r"^make ([a-z-]+)", code) if target not in TARGETS]
        wrong += [path for path in re.findall(r"^(?:tests|shared|services|proto)/[\w./-]+$", code) if not exists(path)]
    assert wrong == []


def exists(path: str) -> bool:
    return (ROOT / path).exists()


def all_options() -> Iterator[str]:
    waiting = [PROGRAM]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        for parameter in command.params:
            yield from parameter.opts


TOML_BLOCKS = [block for path in MANUALS for block in documents.blocks(path) if block.language == "toml"]


@pytest.mark.parametrize("block", TOML_BLOCKS, ids=str)
def test_every_toml_file_that_is_shown_would_be_taken(block: Block, tmp_path: Path) -> None:
    (file,) = re.findall(r"\A# (\S+)", block.text)
    if file == "limits.toml":
        assert parse_limits(block.text, CoreLimits()) != CoreLimits()
    elif file == "hosts.toml":
        path = tmp_path / file
        path.write_text(block.text)
        assert len(read_hosts(path).hosts) > 1
    elif file in ("weir.toml", "stack.toml"):
        path = tmp_path / file
        path.write_text(block.text)
        has_tables = "models" in tomllib.loads(block.text)
        assert bool(models_from_document(tomllib.loads(block.text), StackModel(), file).groups) == has_tables
        of_services = {entry.name for role in ROLES for entry in fields(service_config(role))}
        resolve_config(StackConfig, "up", flags={}, environ={}, toml_path=path, ignored=of_services)
        for role in ROLES:
            resolve_config(service_config(role), role, flags={}, environ={}, toml_path=path)
    else:
        assert file == "pyproject.toml"
        assert tomllib.loads(block.text)


PYTHON_BLOCKS = [block for path in MANUALS for block in documents.blocks(path) if block.language == "python"]


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=str)
def test_every_name_that_a_program_imports_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_the_floors_of_the_library_are_those_of_the_guard() -> None:
    ((*rows,),) = documents.tables(ROOT / "shared/docs/architecture.md", "Rooms and floors of the library")
    shown = {(int(floor) - 1, room.strip("`")) for floor, room, _ in rows}
    assert shown == {(floor, room) for floor, rooms in enumerate(FLOORS) for room in rooms}
