"""Python clients of the gateway's gRPC port: `WeirClient` blocks, `AsyncWeirClient` awaits; both raise `core.errors`.

Requests and answers are plain dataclasses; no protobuf type leaves this room.
"""

from weir.client.aio import DEFAULT_TIMEOUT_S, AsyncWeirClient
from weir.client.messages import Chunk, ModelInfo, ProcessDescription, Turn
from weir.client.sync import WeirClient
from weir.core.life import FinishReason
from weir.core.logprobs import TokenLogprobs
from weir.core.options import GenerateOptions

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "AsyncWeirClient",
    "Chunk",
    "FinishReason",
    "GenerateOptions",
    "ModelInfo",
    "ProcessDescription",
    "TokenLogprobs",
    "Turn",
    "WeirClient",
]
