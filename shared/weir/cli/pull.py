"""`weir pull`: models into the model cache."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from weir.cli.console import fail, stderr, stdout
from weir.model.errors import ModelNotFound, PullError
from weir.model.files.catalog import CATALOG, PullProgress, pull_model


def pull(name: Annotated[str, typer.Argument(help=f"One of: {', '.join(CATALOG)}.")]) -> None:
    """Get a model, check it, and keep it in the model cache ($WEIR_CACHE or ~/.cache/weir).

    \b
    weir pull smollm2-135m
    """
    try:
        path = pull_with_progress(name)
    except (ModelNotFound, PullError) as error:
        fail(str(error))
    stdout.out(str(path))


def pull_with_progress(name: str) -> Path:
    """Raises ModelNotFound or PullError."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        tasks = {stage: bar.add_task(stage, total=None, visible=False) for stage in ("download", "extract", "verify")}

        def show(progress: PullProgress) -> None:
            bar.update(
                tasks[progress.stage], completed=progress.done_bytes, total=progress.total_bytes or None, visible=True
            )

        return pull_model(name, show)
