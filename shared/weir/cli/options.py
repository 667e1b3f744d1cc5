"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Address = Annotated[
    str, typer.Option(help="The gateway's gRPC port, HOST:PORT.", envvar="WEIR_ADDRESS", show_default=True)
]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; range [0, 2].")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability; (0, 1].")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")]
MaxTokens = Annotated[int | None, typer.Option(help="At most this many tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-text token.")]
Lane = Annotated[str, typer.Option(help="Lane to queue in. Empty: the default lane.")]
ModelName = Annotated[str, typer.Option(help="Model to ask. Empty: the only one served.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]

Instance = Annotated[
    str, typer.Option(help="Name of the instance. Default: the only one that runs.", envvar="WEIR_INSTANCE")
]
InstancePort = Annotated[int | None, typer.Option("--grpc-port", help="Its gRPC port, instead of its name.")]
RuntimeDir = Annotated[
    Path | None, typer.Option(help="Folder that holds the folder of each instance.", envvar="WEIR_RUNTIME_DIR")
]

DEFAULT_ADDRESS = "127.0.0.1:50051"
