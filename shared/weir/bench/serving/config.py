"""What a run of `weir bench serve` is: whom it asks, in which words, what, and when."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weir.bench.serving.arrivals import ArrivalPlan
from weir.bench.serving.datasets import Dataset, RandomPrompts
from weir.bench.serving.jobs import Mix

Backend = Literal["openai", "vllm", "openai-chat", "grpc", "grpc-chat"]
ENDPOINTS: Mapping[str, str] = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "grpc": "",
    "grpc-chat": "",
}
"""Backend -> path of its HTTP endpoint. `vllm` is another word for `openai`, for command lines that say so."""
DEFAULT_MAX_CONCURRENCY = 32


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """One run. `max_concurrency` bounds the requests in flight; None: as many as come.

    `api_keys` are those of the tenants, by name, `""`: of the others.
    """

    base_url: str
    """Over gRPC: HOST:PORT."""
    model: str
    backend: Backend = "openai"
    endpoint: str = ""
    """Empty: the backend's."""
    num_prompts: int = 64
    dataset: Dataset = field(default_factory=RandomPrompts)
    arrivals: ArrivalPlan = field(default_factory=ArrivalPlan)
    max_concurrency: int | None = DEFAULT_MAX_CONCURRENCY
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float = 600.0
    """Of one whole answer."""
    sends_texts: bool = False
    """Words in place of token ids, for servers that take no ids; a word is about a token."""
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Fields of every request: sampling options, and those that only this server knows."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    request_id_prefix: str = ""
    """Before the number of a request, in X-Request-Id; empty: the server numbers."""
    lanes: Mix = field(default_factory=Mix)
    tenants: Mix = field(default_factory=Mix)
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca: str = ""
    """File with the authorities of the server's certificate; empty: those that the client brings."""

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def is_chat(self) -> bool:
        return self.backend.endswith("-chat")

    @property
    def is_grpc(self) -> bool:
        return self.backend.startswith("grpc")
