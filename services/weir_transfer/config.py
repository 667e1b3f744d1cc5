"""Settings of the transfer service."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from weir.core.addresses import UNIX
from weir.core.fields import ByteSize, check_range
from weir.kv.arena.segment import DEFAULT_DIRECTORY, segment_path
from weir.kv.layout import MAX_LEASES
from weir.kv.memory.server import MEMORY_SOCKET
from weir.kv.memory.slabs import WEIGHTS_SOCKET
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.source import resolve_model
from weir.model.precision import choose_arithmetic, page_geometry
from weir.runtime.config import PAGE_FILES_BYTES, ServiceConfig, setting
from weir.runtime.page_tiers import (
    PAGE_MEMORY_HELP,
    PAGE_VALKEY_HELP,
    PAGE_VALKEY_INSECURE_HELP,
    check_page_memory,
    check_page_valkey,
)
from weir_transfer.messages import ArenaSettings

_MAX_MODELS = 64
_MAX_VALKEY_TTL_S = 366 * 24 * 3600
_MAX_VALKEY_TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class TransferConfig(ServiceConfig):
    """The transfer service of one host: owns the arena.

    `page_bytes` and `model_digest` come from the model unless both are given, together with `max_context_tokens`.
    """

    arena_bytes: ByteSize = setting(
        0,
        "Memory for pages, taken at once: of /dev/shm, or of the workers' device. 0: what the model can use, if free.",
    )
    num_slots: int = setting(512, "Sequences that can be in the arena at a time.")
    heartbeat_interval_ms: int = setting(200, "How often a worker sends a sign of life.")
    lease_ttl_ms: int = setting(2000, "Silence after which a worker's process is killed.")
    prefix_cache: bool = setting(True, "Keep computed pages, so that prompts with the same prefix share them.")
    prefix_wait_ms: int = setting(10_000, "How long a prompt waits for a prefix that another one is computing.")
    adoption_wait_ms: int = setting(
        30_000, "How long sequences of a dead decode worker wait for another. 0: not at all."
    )
    segment_dir: Path = field(
        default=DEFAULT_DIRECTORY, metadata={"help": "Where the arena's file is made; must be memory (tmpfs)."}
    )
    page_bytes: ByteSize = setting(0, "Bytes of a page. 0: what the model needs.")
    max_context_tokens: int = setting(0, "Longest sequence; workers keep to it. 0: the model's context, or what fits.")
    model_digest: str = setting("", "Digest that workers must show. Empty: the model's.")
    pages_listen: str = setting(
        "",
        "HOST:PORT at which transfer services of other hosts ask for cached pages. Empty: none pass between hosts.",
    )
    page_streams_port: int = setting(0, "Port beside it at which the pages themselves are sent. 0: any free one.")
    page_files_dir: str = setting(
        "", "Folder where computed pages outlive the arena, one that hosts share or a disk's own. Empty: they do not."
    )
    page_files_bytes: ByteSize = setting(PAGE_FILES_BYTES, "Bytes of files there, of all models together.")
    page_files_write_bytes_per_s: ByteSize = setting(64 << 20, "Bytes a second that are written there at most.")
    page_files_min_uses: int = setting(1, "Prompts that must have used a page before it is written there.")
    page_valkey_url: str = setting("", PAGE_VALKEY_HELP)
    page_valkey_password_file: str = setting("", "File with its password. Empty: it wants none.")
    page_valkey_ca_file: str = setting("", "File with the authorities of its certificate. Empty: the system's.")
    page_valkey_insecure: bool = setting(False, PAGE_VALKEY_INSECURE_HELP)
    page_valkey_ttl_s: int = setting(7 * 24 * 3600, "Seconds after which it forgets a page that nobody used.")
    page_valkey_timeout_ms: int = setting(1000, "Time that a command to it and its answer may take.")
    page_valkey_write_bytes_per_s: ByteSize = setting(64 << 20, "Bytes a second that are written there at most.")
    page_memory_bytes: ByteSize = setting(0, PAGE_MEMORY_HELP)
    workers_on_machine: int = setting(2, "Workers beside which the arena has to fit, where arena_bytes is 0.")
    models_on_machine: int = setting(
        1, "Models that share this machine's memory, each with an arena and workers, where arena_bytes is 0."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, smallest in (
            ("arena_bytes", 0),
            ("page_bytes", 0),
            ("num_slots", 1),
            ("heartbeat_interval_ms", 10),
            ("prefix_wait_ms", 0),
            ("adoption_wait_ms", 0),
            ("page_files_write_bytes_per_s", 1),
            ("page_files_min_uses", 1),
            ("page_valkey_write_bytes_per_s", 1),
            ("page_memory_bytes", 0),
        ):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {smallest}")
        if self.pages_listen:
            self.check_safe("pages_listen", self.pages_listen)
        self._check_tiers()
        if self.lease_ttl_ms < 2 * self.heartbeat_interval_ms:
            raise ValueError(
                f"lease_ttl_ms {self.lease_ttl_ms}: must be at least twice the heartbeat_interval_ms "
                f"of {self.heartbeat_interval_ms}"
            )
        if self.max_context_tokens < 0:
            raise ValueError(f"max_context_tokens {self.max_context_tokens}: must not be negative")
        check_range(self, "page_streams_port", 0, 65535)
        check_range(self, "page_valkey_ttl_s", 60, _MAX_VALKEY_TTL_S)
        check_range(self, "page_valkey_timeout_ms", 10, _MAX_VALKEY_TIMEOUT_MS)
        check_range(self, "workers_on_machine", 1, MAX_LEASES)
        check_range(self, "models_on_machine", 1, _MAX_MODELS)
        explicit = (self.page_bytes > 0, bool(self.model_digest))
        if any(explicit) and not (all(explicit) and self.max_context_tokens):
            raise ValueError("page_bytes and model_digest: give both, and max_context_tokens with them, or neither")

    def _check_tiers(self) -> None:
        """Raises ValueError."""
        check_page_memory(self.page_memory_bytes, self.device)
        for name in ("page_files_dir", "page_valkey_url", "page_memory_bytes"):
            if getattr(self, name) and not self.prefix_cache:
                raise ValueError(f"{name} {getattr(self, name)!r}: needs prefix_cache")
        check_page_valkey(self)

    @property
    def num_descriptors(self) -> int:
        """Of every lease a connection and the descriptor of its process."""
        return super().num_descriptors + 2 * MAX_LEASES

    @property
    def segment_path(self) -> Path:
        return segment_path(self.instance, self.segment_dir, self.index)

    @property
    def memory_socket_path(self) -> Path:
        """Where page memory on a device is handed out."""
        return self.weights_socket_path.with_name(MEMORY_SOCKET)

    @property
    def weights_socket_path(self) -> Path:
        """Where workers share weights on a device: beside the socket that they know."""
        is_socket = self.listen.startswith(UNIX)
        folder = Path(self.listen.removeprefix(UNIX)).parent if is_socket else self.instance_dir
        return folder / WEIGHTS_SOCKET

    @property
    def arena_settings(self) -> ArenaSettings:
        return ArenaSettings(
            self.heartbeat_interval_ms,
            self.lease_ttl_ms,
            self.prefix_cache,
            self.prefix_wait_ms,
            self.adoption_wait_ms,
        )


def with_model_shape(config: TransferConfig) -> TransferConfig:
    """The same with page size, context and digest of the model, read from its files where they are not given.

    Raises ModelError: no such model, none that the device computes, or `max_context_tokens` is above the model's.
    """
    if config.model_digest:
        return config
    source = resolve_model(config.model_reference)
    model = load_model_config(source, config.max_context_tokens)
    return replace(
        config,
        page_bytes=page_geometry(model, choose_arithmetic(config.precision, model, config.device)).page_bytes,
        max_context_tokens=model.context_within(config.max_context_tokens),
        model_digest=model_digest(
            source,
            config.precision,
            config.device,
            exact=config.exact,
            max_context_tokens=config.max_context_tokens,
        ),
    )
