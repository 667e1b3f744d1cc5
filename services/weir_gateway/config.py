"""Settings of the gateway."""

import math
from dataclasses import dataclass
from typing import Literal

from weir.core.fields import ByteSize, check_range
from weir.rpc.channel import MAX_MESSAGE_BYTES
from weir.runtime.config import ServiceConfig, check_together, setting
from weir.runtime.stack.models import (
    CHAT_TEMPLATE_HELP,
    REASONING_FORMAT_HELP,
    TOOL_FORMAT_HELP,
    ReasoningFormatName,
    ToolFormatName,
)

_MAX_REQUESTS = 65_536
_MIN_SHARE, _MAX_SHARE = 0.01, 2  # of all threads that prepare
_MAX_PROMPTS = 4096  # times 16 answers each: as many ids as a request has
_LISTED_PROMPT_BYTES = 64 << 10
_MAX_LOG_MB = 1 << 20
_MIN_MESSAGE_BYTES = 1 << 16
_MAX_ADOPTER_WAIT_S = 30  # what it looks at most where no other worker can go on
_MAX_CLAIM_WAIT_S = 3600
_MAX_KEEP_ALIVE_S = 3600
_BATCH_SCHEMES = ("sqlite", "postgresql", "postgres")
_MAX_BATCH_LINES = 1_000_000
_MAX_BATCH_FILE_MB = 1024
_MAX_KEEP_DAYS = 365
_MIN_AUDIT_HOURS, _MAX_AUDIT_HOURS = 0.01, 87_600


@dataclass(frozen=True)
class GatewayConfig(ServiceConfig):
    """The gateway: takes requests by gRPC and HTTP, and drives each to its end."""

    listen: str = setting("127.0.0.1:50051", "Address of the gRPC server: HOST:PORT (port 0: any free one).")
    http_host: str = setting("127.0.0.1", "Address that the HTTP server listens on.")
    http_port: int = setting(8000, "Port of the HTTP server; 0: any free one.")
    public_tls_cert: str = setting(
        "",
        "File with the certificate of the gRPC and the HTTP port, and those between it and its authority. Empty: no "
        "TLS.",
    )
    public_tls_key: str = setting("", "File with its key.")
    models_file: str = setting(
        "", "TOML file of [models.NAME] tables, followed while it changes: serve these. Empty: the setting model."
    )
    chat_template: str = setting("", CHAT_TEMPLATE_HELP)
    tool_format: ToolFormatName = setting("auto", TOOL_FORMAT_HELP)
    reasoning_format: ReasoningFormatName = setting("auto", REASONING_FORMAT_HELP)
    max_requests: int = setting(1024, "Requests in flight at most; more are refused with a hint to try again.")
    max_idle_connections: int = setting(
        8192, "Connections of each port on which nothing is asked; over it HTTP closes the longest idle, gRPC refuses."
    )
    default_max_tokens: int = setting(512, "Output tokens of a request that names no max_tokens.")
    max_prompt_bytes: ByteSize = setting(
        1 << 20, "Bytes of text that are tokenized at most; larger prompts are refused."
    )
    max_prompts: int = setting(256, "Prompts of one request at most, where it is a list.")
    max_message_bytes: ByteSize = setting(
        0, "Bytes of one gRPC message to the gateway at most. 0: twice max_prompt_bytes, and 2 MiB for all else."
    )
    max_bodies_bytes: ByteSize = setting(
        256 << 20, "Bytes of requests that are being read at once at most, by gRPC and HTTP together."
    )
    prepare_share: float = setting(
        0.25,
        "Of a core, what one tenant's long bodies and prompts may take to be read and prepared while others ask too.",
    )
    max_context_tokens: int = setting(
        0, "Prompt and output of a request together. 0: the model's context, or the workers'."
    )
    max_prompt_logprobs: int = setting(
        65_536, "Log-probabilities of one prompt at most: its tokens times (1 + prompt_logprobs)."
    )
    prefix_hints: bool = setting(
        True, "Send the scheduler hashes of prompts' pages, so that it finds what is cached. Reads the weights once."
    )
    scheduler_wait_s: float = setting(8.0, "Seconds that a new request waits for a scheduler that does not answer.")
    accepted_scheduler_wait_s: float = setting(60.0, "The same, of a request that it had accepted.")
    max_queue_s: float = setting(900.0, "Seconds that a request waits for its grant at most.")
    no_progress_s: float = setting(
        120.0, "Seconds without a token, though all workers live, after which a request is dispatched again."
    )
    worker_lost_s: float = setting(3.0, "Seconds without a stream to a worker after which its requests go to others.")
    adopter_wait_s: float = setting(
        2.0, "Seconds to look for the worker that goes on with a lost worker's sequence, before it is computed again."
    )
    claim_wait_s: float = setting(
        1.0, "Seconds to look for the sequence of a request that another gateway died with; then it is computed again."
    )
    openai_priority: Literal["higher-first", "lower-first"] = setting(
        "higher-first", "Which way the field `priority` of HTTP requests goes: up or down the lanes from the default."
    )
    vllm_metrics: bool = setting(True, "Show vLLM's names on GET /metrics beside Weir's.")
    send_timeout_s: float = setting(60.0, "Seconds after which a client that does not read is given up.")
    keeps_responses: bool = setting(
        True, "Keep answers of /v1/responses for a day, for all gateways, so that a request can go on from one."
    )
    batch_store: str = setting(
        "",
        "Database of batch jobs: postgresql://… or sqlite:///PATH. Empty: a file beside the instance's logs, for the "
        "gateways of one host. `off`: no batches.",
    )
    batch_at_once: int = setting(32, "Lines of batches that this gateway has answered at once.")
    batch_lease_s: float = setting(15.0, "Seconds after which another gateway takes over a dead one's lines.")
    batch_max_lines: int = setting(50_000, "Lines of one batch at most.")
    batch_max_open: int = setting(16, "Batches of one tenant that run, at most.")
    batch_file_mb: int = setting(64, "MiB of one uploaded file at most.")
    batch_tenant_mb: int = setting(1024, "MiB of all files that a tenant uploads; over it uploads are refused.")
    batch_keep_days: int = setting(30, "Days that a batch stays after its end, and its output files.")
    sse_keep_alive_s: float = setting(
        15.0, "Seconds without an event after which a stream over HTTP gets a comment, for proxies. 0: never."
    )
    after_stream_error: Literal["cut", "done"] = setting(
        "cut", "How a stream over HTTP ends after an error event: its connection is cut, or `[DONE]` follows."
    )
    unknown_fields: Literal["ignore", "refuse"] = setting(
        "ignore", "HTTP requests with fields that are not known: these are ignored and named in a header, or refused."
    )

    resume_s: float = setting(
        30.0,
        "Seconds that a request with an idempotency key is kept: after its client went away, and by workers after its "
        "gateway died (these at most an hour).",
    )
    max_kept: int = setting(256, "Requests that are kept so at most; then the one that waited longest is let go.")
    max_kept_mb: int = setting(64, "MiB that they may take, roughly.")
    max_recent_requests: int = setting(1000, "Requests that have ended and are remembered for `weir trace` at most.")
    max_recent_mb: int = setting(8, "MiB that they may take, roughly.")
    max_console_watchers: int = setting(16, "Consoles and `weir top` that are sent the stack's state at once at most.")

    predictor: str = setting("", "File of `weir train-predictor` that predicts output lengths. Empty: none.")
    request_log: str = setting("", "File to log ended requests to, to train a predictor on. Empty: none.")
    request_log_text: bool = setting(False, "Log prompts' tokens, which are their text; else their pooled features.")
    request_log_mb: int = setting(64, "Size of the request log at most, in MiB, with the part that is rotated out.")

    audit: bool = setting(False, "Keep life events of requests in a stream of NATS, for `weir audit`; no texts.")
    audit_mb: int = setting(64, "Size of that stream at most, in MiB; the oldest events make room.")
    audit_hours: float = setting(168.0, "Hours that events stay in it at most.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "http_port", 0, 65535)
        check_together(self, "public_tls_cert", "public_tls_key")
        if not self.http_host:
            raise ValueError("http_host is empty: name an address, such as 127.0.0.1")
        check_range(self, "max_requests", 1, _MAX_REQUESTS)
        check_range(self, "max_idle_connections", 1, _MAX_REQUESTS)
        check_range(self, "max_prompts", 1, _MAX_PROMPTS)
        for name in ("default_max_tokens", "max_prompt_bytes", "max_prompt_logprobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.max_message_bytes and not _MIN_MESSAGE_BYTES <= self.max_message_bytes <= MAX_MESSAGE_BYTES:
            limit = f"must be 0, or in [{_MIN_MESSAGE_BYTES}, {MAX_MESSAGE_BYTES}]"
            raise ValueError(f"max_message_bytes {self.max_message_bytes}: {limit}")
        if self.max_bodies_bytes < self.message_bytes:
            limit = f"must be at least the {self.message_bytes} of one gRPC message"
            raise ValueError(f"max_bodies_bytes {self.max_bodies_bytes}: {limit}")
        check_range(self, "prepare_share", _MIN_SHARE, _MAX_SHARE)
        check_range(self, "adopter_wait_s", 0, _MAX_ADOPTER_WAIT_S)
        check_range(self, "claim_wait_s", 0, _MAX_CLAIM_WAIT_S)
        check_range(self, "max_kept", 0, _MAX_REQUESTS)
        check_range(self, "sse_keep_alive_s", 0, _MAX_KEEP_ALIVE_S)
        check_range(self, "max_kept_mb", 0, _MAX_LOG_MB)
        check_range(self, "max_recent_requests", 0, _MAX_REQUESTS)
        check_range(self, "max_recent_mb", 0, _MAX_LOG_MB)
        check_range(self, "max_console_watchers", 0, _MAX_REQUESTS)
        check_range(self, "request_log_mb", 1, _MAX_LOG_MB)
        self._check_batches()
        check_range(self, "audit_mb", 1, _MAX_LOG_MB)
        if not _MIN_AUDIT_HOURS <= self.audit_hours <= _MAX_AUDIT_HOURS:
            raise ValueError(f"audit_hours {self.audit_hours}: must be in [{_MIN_AUDIT_HOURS}, {_MAX_AUDIT_HOURS}]")
        if self.max_context_tokens < 0:
            raise ValueError(f"max_context_tokens {self.max_context_tokens}: must not be negative")
        for name in (
            "scheduler_wait_s",
            "accepted_scheduler_wait_s",
            "max_queue_s",
            "no_progress_s",
            "worker_lost_s",
            "send_timeout_s",
            "resume_s",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} {value}: must be a positive number of seconds")

    def _check_batches(self) -> None:
        scheme, mark, _ = self.batch_store.partition("://")
        if self.batch_store not in ("", "off") and not (mark and scheme in _BATCH_SCHEMES):
            # without its text, which may have a password
            raise ValueError("batch_store: must be sqlite:///PATH, postgresql://USER@HOST/DATABASE, off, or empty")
        check_range(self, "batch_at_once", 1, _MAX_REQUESTS)
        check_range(self, "batch_lease_s", 1, _MAX_CLAIM_WAIT_S)
        check_range(self, "batch_max_lines", 1, _MAX_BATCH_LINES)
        check_range(self, "batch_max_open", 1, _MAX_REQUESTS)
        check_range(self, "batch_file_mb", 1, _MAX_BATCH_FILE_MB)
        check_range(self, "batch_tenant_mb", 1, _MAX_LOG_MB)
        check_range(self, "batch_keep_days", 1, _MAX_KEEP_DAYS)

    @property
    def batch_url(self) -> str:
        """Empty: there are no batches."""
        if self.batch_store == "off":
            return ""
        return self.batch_store or f"sqlite:///{self.instance_dir.absolute()}/batches.sqlite"

    @property
    def message_bytes(self) -> int:
        """Of one gRPC message at most. Above what fields may hold, so that a prompt that is too long is named."""
        return self.max_message_bytes or min(2 * self.max_prompt_bytes + (2 << 20), MAX_MESSAGE_BYTES)

    @property
    def body_bytes(self) -> int:
        """Of one HTTP body at most: JSON has up to six bytes for one of a text, so that also here it is named. Of a
        list of prompts each may have _LISTED_PROMPT_BYTES."""
        num_bytes = max(6 * self.max_prompt_bytes, self.max_prompts * _LISTED_PROMPT_BYTES) + (2 << 20)
        return min(num_bytes, MAX_MESSAGE_BYTES, self.max_bodies_bytes)

    @property
    def max_calls(self) -> int:
        """At each port. More than requests, so that one request too many is refused as such."""
        return 2 * self.max_requests + 64

    @property
    def is_public(self) -> bool:
        return True

    @property
    def public_tls(self) -> tuple[str, str]:
        return self.public_tls_cert, self.public_tls_key

    @property
    def num_descriptors(self) -> int:
        """Of both ports; a gRPC connection for every request in flight: clients may share theirs, or not."""
        return super().num_descriptors + self.max_calls + self.max_idle_connections + self.max_connections

    @property
    def max_connections(self) -> int:
        """Of gRPC."""
        return self.max_idle_connections + self.max_requests
