"""What a command needs of the models of a stack before it starts them: their tables, their files, memory."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weir.cli import EXIT_USAGE
from weir.cli.console import fail, stderr
from weir.cli.pull import pull_with_progress
from weir.core.fields import format_size
from weir.model.errors import ModelError
from weir.model.files.catalog import CATALOG
from weir.model.files.source import pinned, resolve_model, try_hub_reference
from weir.model.tokens.chat_template import checked_template
from weir.runtime.config import ConfigError
from weir.runtime.machine_memory import available_bytes, free_disk_bytes
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.models import StackModel, StackModels, models_from_document
from weir.runtime.stack.plan import check_model

_SHARED_MEMORY = Path("/dev/shm")


def read_stack_models(stack: StackConfig, path: Path | None) -> StackModels:
    """Of the tables in the file, or the one that `stack` names. Ends the command on what is wrong."""
    try:
        document = {} if path is None else tomllib.loads(path.read_text())
        models = models_from_document(document, stack.default_model, str(path or "models"))
        for model in models.models:
            check_model(stack, model)
    except ConfigError as error:
        fail(error.message, code=EXIT_USAGE)
    except ValueError as error:
        fail(str(error), code=EXIT_USAGE)
    return models


def need_model(model: StackModel) -> StackModel:
    """Pulls a model of the catalog or the hub that is not there yet; others must be there already.

    Of a branch of the hub every process gets the commit that is there now, also one that is started again later.
    """
    name = model.reference
    model = _with_template(model)
    try:
        if not _is_pulled(name) and (name in CATALOG or try_hub_reference(name) is not None):
            stderr.print(f"model {name} is not here yet: getting it", markup=False, soft_wrap=True)
            pull_with_progress(name)
        resolve_model(name)
        return model if model.load == "dummy" else replace(model, model=pinned(name))
    except ModelError as error:
        where = f"models.{model.name}.model" if model.name else "--model"
        fail(f"{where}: {error}")


def _with_template(model: StackModel) -> StackModel:
    """With a chat template that is there, by a name that every process finds it by."""
    try:
        return replace(model, chat_template=checked_template(model.chat_template))
    except ModelError as error:
        fail(f"models.{model.name}.{error}" if model.name else str(error))


def need_memory(stack: StackConfig, models: Sequence[StackModel]) -> None:
    """Arenas of a size that was asked for must fit together; others take what is free."""
    asked = [model for model in models if model.arena_bytes]
    if stack.device == "cuda" or len(models) < 2 or not asked:
        return
    total_bytes = sum(model.arena_bytes for model in asked)
    free_bytes = min(available_bytes(), free_disk_bytes(_SHARED_MEMORY))
    if total_bytes > free_bytes:
        sizes = " + ".join(f"models.{model.name}.arena_bytes {format_size(model.arena_bytes)}" for model in asked)
        fail(
            f"{sizes} = {format_size(total_bytes)}: {format_size(free_bytes)} are free on this machine, in memory and "
            f"{_SHARED_MEMORY}; lower them, or leave them out and each gets a part of what is free"
        )


def _is_pulled(name: str) -> bool:
    try:
        resolve_model(name)
    except ModelError:
        return False
    return True
