"""`weir bench simulator`: how fast simulations are."""

from typing import Annotated

import typer

from weir.cli import options


def simulator(
    load: Annotated[list[str] | None, typer.Option(help="arena, code or chat; repeat it. Default: all.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Of each simulation.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="Simulations of each kind, in turns.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the choice of lengths, and of the arrivals.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Simulated requests a minute, step-exact and with fast-forward, whose results must be equal.

    Lengths are those of public traces in the folder `traces` of WEIR_TEST_DATA, or without them generated.

    \b
    weir bench simulator --load chat --rounds 5
    """
    from weir.bench.simulator import LOADS, SimulatorBenchConfig
    from weir.bench.simulator import main as bench_simulator

    if unknown := set(load or ()).difference(LOADS):
        raise typer.BadParameter(f"--load {', '.join(sorted(unknown))}: must be {', '.join(LOADS)}")
    config = SimulatorBenchConfig(tuple(load or LOADS), num_requests, rounds, seed)
    raise typer.Exit(bench_simulator(config, as_json=as_json))
