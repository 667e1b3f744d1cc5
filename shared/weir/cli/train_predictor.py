"""`weir train-predictor`: from a gateway's request log to a file that predicts output lengths."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from weir.cli import options
from weir.cli.console import fail, need_extra, stderr, stdout
from weir.model.errors import ModelError


def train_predictor(
    logs: Annotated[list[Path], typer.Argument(help="Request logs, oldest first (the gateway's setting request_log).")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    model: Annotated[str, typer.Option(help="Model whose requests they are.")] = "smollm2-135m",
    kind: Annotated[
        Literal["ranking", "forest"], typer.Option(help="Ranking network (ListMLE), or Magnus's random forest.")
    ] = "ranking",
    seed: Annotated[int, typer.Option(help="The same seed and log give the same file.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Train a predictor of output lengths, and say how well it ranks requests that it has not seen.

    A log comes from a gateway with the setting request_log; some hundred requests are enough to begin with.

    \b
    weir train-predictor requests.jsonl.1 requests.jsonl --out lengths.npz
    WEIR_PREDICTOR=lengths.npz weir up --policy ltr
    """
    need_extra("training", "weir train-predictor")
    from weir.training.make import train_from_logs
    from weir.training.samples import LogError

    with stderr.status("training"):
        try:
            report = train_from_logs(logs, out, model, kind, seed)
        except (ModelError, LogError, ValueError, OSError) as error:
            fail(f"weir train-predictor: {error}")
    if as_json:
        stdout.out(json.dumps(asdict(report), indent=2))
        return
    skipped = "".join(f"; {count} lines {reason} left out" for reason, count in report.skipped.items())
    stdout.out(
        f"{out}: {report.kind} of {report.num_samples} requests to {report.model}, {report.file_bytes / 1e6:.1f} MB; "
        f"Kendall tau {report.held_out_tau:.3f} on requests held out "
        f"(prompt length alone {report.length_tau:.3f}){skipped}"
    )
