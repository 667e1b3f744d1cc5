"""All commands of `weir`."""

import typer

from weir.cli import (
    bench,
    chat,
    doctor,
    down,
    generate,
    limits,
    plan,
    policy,
    profile,
    pull,
    serve,
    simulate,
    status,
    train_predictor,
    up,
)

app = typer.Typer(
    help="Weir serves large language models from separate prefill and decode pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(up.up)
app.command()(down.down)
app.command()(status.status)
app.command(context_settings=serve.SETTINGS)(serve.serve)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(pull.pull)
app.command()(doctor.doctor)
app.command()(simulate.simulate)
app.command()(plan.plan)
app.command()(profile.profile)
app.command()(train_predictor.train_predictor)
app.add_typer(bench.app, name="bench")
app.add_typer(limits.app, name="limits")
app.add_typer(policy.app, name="policy")
