"""`weir pull`: models into the model cache, or into the Hugging Face Hub's."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from weir.cli import EXIT_INTERRUPTED
from weir.cli.console import fail, size_text, stderr, stdout
from weir.model.errors import ModelNotFound, PullError
from weir.model.files.catalog import CATALOG, PullProgress, pull_model
from weir.model.files.hub_reference import HubReference, parse_hub_reference

_FRACTION_A_LINE = 0.1
_SECONDS_A_LINE = 30.0


def pull(
    name: Annotated[str, typer.Argument(help=f"{', '.join(CATALOG)}, or ORG/NAME[:FILE.gguf][@REVISION] of the hub.")],
) -> None:
    """Get a model, check its digests, and keep it.

    Of the Hugging Face Hub ORG/NAME is a folder of safetensors, or its only GGUF file; ORG/NAME:FILE.gguf is one of
    several. It goes to the hub's own cache (HF_HOME), with its token (HF_TOKEN), by its own address (HF_ENDPOINT).
    Pulling again goes on where it was broken off, or gets what is new. The built-in model goes to the model cache
    ($WEIR_CACHE or ~/.cache/weir).

    \b
    weir pull smollm2-135m
    weir pull Qwen/Qwen2.5-0.5B-Instruct
    weir pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_0.gguf
    """
    try:
        path = pull_with_progress(name)
    except (ModelNotFound, PullError) as error:
        fail(str(error))
    stdout.out(str(path))


def pull_with_progress(name: str) -> Path:
    """Raises ModelNotFound or PullError. Ctrl-C ends the command; of a model of the hub what came is kept."""
    if "/" not in name or name in CATALOG:
        with _ProgressLine() as line:
            return pull_model(name, line.show)
    reference = parse_hub_reference(name)
    try:
        return _pull_from_hub(reference)
    except KeyboardInterrupt:
        kept = "what has come is kept, and the same command goes on from there"
        stderr.print(f"{reference}: interrupted; {kept}", markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _pull_from_hub(reference: HubReference) -> Path:
    from huggingface_hub import constants

    from weir.model.hub.pull import PullPlan, PullWatch, pull_from_hub
    from weir.model.hub.repository import Hub

    hub = Hub.of_environment()
    if not constants.is_offline_mode():
        stderr.print(f"asking {hub.endpoint} for {reference}", markup=False, soft_wrap=True)

    def tell(plan: PullPlan) -> None:
        size = f"{size_text(plan.total_bytes)} in {plan.num_files} file{'' if plan.num_files == 1 else 's'}"
        here = plan.total_bytes - plan.missing_bytes
        rest = f", {size_text(here)} of it already here" if here else ""
        where = f"commit {plan.commit[:12]}, into {plan.cache_dir}"
        stderr.print(f"{plan.reference}: {size}{rest}; {where}", markup=False, soft_wrap=True)

    with _ProgressLine() as line:
        return pull_from_hub(reference, hub, PullWatch(tell, line.show))


class _ProgressLine:
    """One line that changes on a terminal; elsewhere a line for each tenth, and for each half minute."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        speed = (TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, *speed, console=stderr, transient=True, disable=not stderr.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._said_fraction = 0.0
        self._said_at_s = time.monotonic()

    def show(self, progress: PullProgress) -> None:
        total_bytes = progress.total_bytes or 1
        if not stderr.is_terminal:
            self._say(progress, progress.done_bytes / total_bytes)
            return
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bar.add_task(progress.stage)
        self._bar.update(self._tasks[progress.stage], completed=progress.done_bytes, total=total_bytes)

    def _say(self, progress: PullProgress, fraction: float) -> None:
        if fraction == self._said_fraction or not (fraction == 1.0 or self._is_due(fraction)):
            return
        self._said_fraction, self._said_at_s = fraction, time.monotonic()
        stderr.print(f"  {progress.stage} {fraction:.0%} of {size_text(progress.total_bytes)}", markup=False)

    def _is_due(self, fraction: float) -> bool:
        is_long_ago = time.monotonic() - self._said_at_s > _SECONDS_A_LINE
        return is_long_ago or not 0 <= fraction - self._said_fraction < _FRACTION_A_LINE

    def __enter__(self) -> "_ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
