"""`weir models`: what is on this machine to be served."""

import json
from dataclasses import asdict

from weir.cli import options
from weir.cli.console import size_text, stderr, stdout

_SHOWN_COMMIT_CHARS = 12


def models(as_json: options.AsJson = False) -> None:
    """List the models that are here: the built-in one and those of the Hugging Face Hub's cache (HF_HOME).

    What stands first is what --model takes. Those that Weir does not serve are listed with the reason.

    \b
    weir models
    weir models --json
    """
    from weir.model.hub.local_models import list_local_models

    found = list_local_models()
    if as_json:
        stdout.out(json.dumps([asdict(model) for model in found], indent=1), highlight=False)
        return
    width = max(len(model.name) for model in found)
    stdout.print(f"{'model':<{width}}  {'size':>9}  {'revision':<{_SHOWN_COMMIT_CHARS}}  usable", markup=False)
    for model in found:
        revision = model.revision[:_SHOWN_COMMIT_CHARS]
        line = f"{model.name:<{width}}  {size_text(model.size_bytes):>9}  {revision:<{_SHOWN_COMMIT_CHARS}}  "
        stdout.print(line, end="", markup=False, soft_wrap=True)
        stdout.print(
            model.obstacle or "yes", style="yellow" if model.obstacle else "green", markup=False, soft_wrap=True
        )
        stdout.print(f"  {model.path}", style="dim", markup=False, soft_wrap=True)
        if model.partial_bytes:
            kept = f"  {size_text(model.partial_bytes)} of files that are not whole: `weir pull` goes on with them"
            stderr.print(kept, style="yellow", markup=False, soft_wrap=True)
