"""`weir certs`: certificates of an authority of one's own, for a lab, or until there is a real one."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from weir.cli import EXIT_USAGE, options
from weir.cli.console import error_line, fail, need_extra, stdout
from weir.core.errors import WeirError
from weir.rpc.identities import DEFAULT_TRUST_DOMAIN, CertifiedIdentity

app = typer.Typer(no_args_is_help=True, help="Certificates by which processes prove who they are.")

Force = Annotated[bool, typer.Option("--force", help="Replace files that are there.")]
Folder = Annotated[Path, typer.Argument(help="Folder of the authority.")]
_MAX_DAYS = 3650


@app.command()
def ca(
    folder: Folder,
    days: Annotated[float, typer.Option(min=0.001, max=_MAX_DAYS, help="Days that it is valid.")] = 90,
    force: Force = False,
) -> None:
    """Make an authority: FOLDER/ca.pem, which everybody trusts, and FOLDER/ca.key, which nobody else may have.

    \b
    weir certs ca certs
    """
    need_extra("certs", "weir certs")
    from weir.runtime.authority import make_authority

    try:
        made = make_authority(folder, days=days, force=force)
    except (WeirError, OSError) as error:
        _fail(error)
    stdout.out(str(made.cert))


@app.command()
def issue(
    folder: Folder,
    role: Annotated[
        Literal["transfer", "scheduler", "prefill", "decode", "gateway", "operator", "public"],
        typer.Option(help="Whose: of a process, of operators' commands, or public: what clients of gateways see."),
    ],
    host: Annotated[
        list[str],
        typer.Option(help="Its host, or another name of its own; of public the names that clients use, several times."),
    ],
    instance: Annotated[str, typer.Option(help="The instance that it is of.", envvar="WEIR_INSTANCE")] = "default",
    trust_domain: Annotated[str, typer.Option(help="Of the names of all of a stack.")] = DEFAULT_TRUST_DOMAIN,
    days: Annotated[float, typer.Option(min=0.001, max=_MAX_DAYS, help="Days that it is valid.")] = 7,
    out: Annotated[Path | None, typer.Option(help="Folder that it is put into. Default: FOLDER.")] = None,
    force: Force = False,
) -> None:
    """Make a key and a certificate of the authority in FOLDER for one process; prints where they are.

    Processes that run see the new files within seconds, and use them for new connections.

    \b
    weir certs issue certs --role decode --host gpu-1
    weir certs issue certs --role gateway --host front-1 --days 30 --force
    weir certs issue certs --role public --host localhost --host 127.0.0.1
    """
    need_extra("certs", "weir certs")
    from weir.runtime.authority import issue_member, issue_public

    if role != "public" and len(host) > 1:
        fail(f"--host: a {role} has one; only --role public may have several", code=EXIT_USAGE)
    try:
        if role == "public":
            made = issue_public(folder, tuple(host), days=days, force=force, out=out)
        else:
            identity = CertifiedIdentity(instance, role, host[0], trust_domain)
            made = issue_member(folder, identity, days=days, force=force, out=out)
    except ValueError as error:
        fail(str(error), code=EXIT_USAGE)
    except (WeirError, OSError) as error:
        _fail(error)
    stdout.out(f"{made.cert}\n{made.key}")


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A certificate in PEM; of several the first.")],
    as_json: options.AsJson = False,
) -> None:
    """Say whose a certificate is, who signed it, and how long it lasts.

    \b
    weir certs show certs/decode-gpu-1.pem
    """
    need_extra("certs", "weir certs")
    from weir.runtime.authority import read_certificate

    try:
        shown = read_certificate(file)
    except (WeirError, OSError) as error:
        _fail(error)
    if as_json:
        stdout.out(json.dumps(asdict(shown), indent=1))
        return
    left_h = (shown.expires_at_s - time.time()) / 3600
    lasts = f"{left_h / 24:.1f} days left" if left_h > 48 else f"{left_h:.1f} h left" if left_h > 0 else "expired"
    lines = {
        "subject": shown.subject,
        "issuer": shown.issuer,
        "names": "\n          ".join(shown.names) or "none",
        "valid": f"{_moment(shown.begins_at_s)} to {_moment(shown.expires_at_s)}, {lasts}",
        "key": shown.key,
    }
    for name, text in lines.items():
        stdout.out(f"{name:<9} {text}", highlight=False)


def _moment(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


def _fail(error: WeirError | OSError) -> NoReturn:
    fail(error_line(error) if isinstance(error, WeirError) else str(error))
