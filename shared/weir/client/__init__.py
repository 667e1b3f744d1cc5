"""Python clients of the gateway's gRPC port: `WeirClient` blocks, `AsyncWeirClient` awaits; both raise `core.errors`.

Requests and answers are plain dataclasses; no protobuf type leaves this room.
"""

from weir.client.chats import ChatAnswer, ContentPart, ReasoningPart, ToolCall, ToolCallDelta, Tools, Turn
from weir.client.gateway import DEFAULT_TIMEOUT_S, AsyncWeirClient, WeirClient
from weir.client.messages import Chunk, ModelInfo, ProcessDescription
from weir.core.life import FinishReason
from weir.core.options import GenerateOptions
from weir.core.sampling import TokenLogprobs
from weir.core.tools import Tool

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "AsyncWeirClient",
    "ChatAnswer",
    "Chunk",
    "ContentPart",
    "FinishReason",
    "GenerateOptions",
    "ModelInfo",
    "ProcessDescription",
    "ReasoningPart",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Tools",
    "Turn",
    "WeirClient",
]
