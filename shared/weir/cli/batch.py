"""`weir batch`: files of requests, answered when there is room, by OpenAI's files and batches over HTTP."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weir.cli import EXIT_FAILED, EXIT_USAGE, options
from weir.cli.console import fail, stderr, stdout
from weir.rpc.tls.public import https_context

if TYPE_CHECKING:
    import httpx

app = typer.Typer(help="Files of requests, answered when there is room.", no_args_is_help=True)

Url = Annotated[str, typer.Option(help="The gateway's HTTP port.", envvar="WEIR_HTTP_URL")]
BatchId = Annotated[str, typer.Argument(help="As `weir batch submit` printed it.", show_default=False)]
_DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 300.0
_WAIT_S = 1.0
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")


@app.command()
def submit(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL: a request a line, see below.")],
    completion_window: Annotated[str, typer.Option(help="Time for all lines: 24h, 30m …; at most 30d.")] = "24h",
    url: Url = _DEFAULT_URL,
    api_key: options.ApiKey = "",
    ca: options.Ca = "",
    as_json: options.AsJson = False,
) -> None:
    """Hand in a file of requests; prints the batch's id.

    A line is {"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}, as OpenAI's batches and
    `vllm run-batch` have it. The endpoint is that of the first line. Bad lines are named, and the others answered.

    \b
    weir batch submit batch.jsonl
    weir batch submit batch.jsonl --completion-window 2h --json
    """
    endpoint = _endpoint_of(source)
    with _client(url, api_key, ca) as client, source.open("rb") as content:
        file = _asked(client, "POST", "/v1/files", data={"purpose": "batch"}, files={"file": (source.name, content)})
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": completion_window}
        batch = _asked(client, "POST", "/v1/batches", json=body)
    for error in (batch["errors"] or {"data": []})["data"]:
        stderr.print(error["message"], style="yellow", markup=False)
    stdout.out(json.dumps(batch) if as_json else batch["id"], highlight=False)
    if batch["status"] == "failed":
        fail("no line of it is a request")


@app.command()
def status(
    batch_id: BatchId,
    waits: Annotated[bool, typer.Option("--wait", help="Show the progress until it has ended.")] = False,
    url: Url = _DEFAULT_URL,
    api_key: options.ApiKey = "",
    ca: options.Ca = "",
    as_json: options.AsJson = False,
) -> None:
    """Show how far a batch is.

    \b
    weir batch status batch_8f3a --wait
    """
    with _client(url, api_key, ca) as client:
        batch = _waited(client, batch_id) if waits else _batch(client, batch_id)
    stdout.out(json.dumps(batch) if as_json else _line_of(batch), highlight=False)


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=100, help="So many at most, the newest first.")] = 20,
    url: Url = _DEFAULT_URL,
    api_key: options.ApiKey = "",
    ca: options.Ca = "",
    as_json: options.AsJson = False,
) -> None:
    """Show the batches that there are, and how far each is.

    \b
    weir batch list
    weir batch list --limit 100 --json
    """
    with _client(url, api_key, ca) as client:
        batches = _asked(client, "GET", "/v1/batches", params={"limit": limit})["data"]
    if as_json:
        stdout.out(json.dumps(batches), highlight=False)
        return
    for batch in batches:
        stdout.out(_line_of(batch), highlight=False)


@app.command()
def cancel(
    batch_id: BatchId,
    url: Url = _DEFAULT_URL,
    api_key: options.ApiKey = "",
    ca: options.Ca = "",
    as_json: options.AsJson = False,
) -> None:
    """End a batch; what is answered can be fetched.

    \b
    weir batch cancel batch_8f3a
    """
    with _client(url, api_key, ca) as client:
        batch = _asked(client, "POST", f"/v1/batches/{batch_id}/cancel")
    stdout.out(json.dumps(batch) if as_json else _line_of(batch), highlight=False)


@app.command()
def fetch(
    batch_id: BatchId,
    output_path: Annotated[Path | None, typer.Option("--output", help="Default: the batch's id and .jsonl.")] = None,
    errors_path: Annotated[Path | None, typer.Option("--errors", help="Default: the same and .errors.jsonl.")] = None,
    waits: Annotated[bool, typer.Option("--wait", help="First show the progress until it has ended.")] = False,
    url: Url = _DEFAULT_URL,
    api_key: options.ApiKey = "",
    ca: options.Ca = "",
) -> None:
    """Write the answers of a batch that has ended, and its errors if there are any. Exit code 1: some lines failed.

    \b
    weir batch fetch batch_8f3a --wait --output batch_answers.jsonl
    """
    output_path = output_path or Path(f"{batch_id}.jsonl")
    errors_path = errors_path or output_path.with_suffix(".errors.jsonl")
    with _client(url, api_key, ca) as client:
        batch = _waited(client, batch_id) if waits else _batch(client, batch_id)
        if batch["status"] in _OPEN:
            fail(f"{_line_of(batch)}: it has not ended; wait with --wait, or cancel it")
        for file_id, path in ((batch["output_file_id"], output_path), (batch["error_file_id"], errors_path)):
            if file_id is not None:
                _download(client, file_id, path)
                stderr.print(f"{path}", markup=False)
    stderr.print(_line_of(batch), markup=False)
    if batch["request_counts"]["failed"]:
        raise typer.Exit(EXIT_FAILED)


def _endpoint_of(source: Path) -> str:
    """Of the first line that has one; the gateway names lines that have none."""
    try:
        with source.open("rb") as lines:
            found = next(filter(None, map(_try_url_of, lines)), None)
    except OSError as error:
        fail(f"{source}: {error.strerror or error}", code=EXIT_USAGE)
    if found is not None:
        return found
    return fail(f'{source}: no line has a "url", such as "/v1/chat/completions"', code=EXIT_USAGE)


def _try_url_of(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    url = entry.get("url") if isinstance(entry, dict) else None
    return url if isinstance(url, str) else None


@contextmanager
def _client(url: str, api_key: str, ca: str) -> "Iterator[httpx.Client]":
    """Ends the command where the gateway is not there."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with options.usable_ca():
        verify, base_url = https_context(ca), url.removesuffix("/v1")
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S, verify=verify) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"{url}: {error or type(error).__name__}; is the gateway there? name it by --url")


def _asked(client: "httpx.Client", method: str, path: str, **what: Any) -> dict[str, Any]:
    answer = client.request(method, path, **what)
    try:
        found = answer.json()
    except ValueError:
        fail(f"{client.base_url}: status {answer.status_code}, and no JSON; is it a gateway of Weir?")
    if answer.status_code != 200:
        fail(found["error"]["message"])
    assert isinstance(found, dict)
    return found


def _batch(client: "httpx.Client", batch_id: str) -> dict[str, Any]:
    return _asked(client, "GET", f"/v1/batches/{batch_id}")


def _waited(client: "httpx.Client", batch_id: str) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr) as bar:
        task = bar.add_task("answering", total=None)
        while True:
            batch = _batch(client, batch_id)
            counts = batch["request_counts"]
            bar.update(task, total=counts["total"], completed=counts["completed"] + counts["failed"])
            if batch["status"] not in _OPEN:
                return batch
            time.sleep(_WAIT_S)


def _download(client: "httpx.Client", file_id: str, target: Path) -> None:
    """In one step: a file of that name is whole."""
    scratch = target.with_name(f"{target.name}.partial")
    try:
        with client.stream("GET", f"/v1/files/{file_id}/content") as answer, scratch.open("wb") as output:
            if answer.status_code != 200:
                fail(f"{file_id}: status {answer.status_code}; it may have expired, or been deleted")
            for data in answer.iter_bytes():
                output.write(data)
        scratch.replace(target)
    except OSError as error:
        fail(f"{target}: {error.strerror or error}")


def _line_of(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    done = f"{counts['completed']} of {counts['total']} answered, {counts['failed']} failed"
    return f"{batch['id']} {batch['status']}: {done}"
