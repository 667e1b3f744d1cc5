"""Python clients of the gateway's gRPC port: `WeirClient` blocks, `AsyncWeirClient` awaits; both raise `core.errors`.

Requests and answers are plain dataclasses; no protobuf type leaves this room.
"""

from weir.client.gateway import DEFAULT_TIMEOUT_S, AsyncWeirClient, WeirClient
from weir.client.messages import Chunk, ModelInfo, ProcessDescription, Turn
from weir.core.life import FinishReason
from weir.core.options import GenerateOptions
from weir.core.sampling import TokenLogprobs

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
