"""Settings that both worker kinds have."""

import re
from dataclasses import dataclass
from pathlib import Path

from weir.kv.memory.cuda import CudaDriver
from weir.kv.memory.slabs import WEIGHTS_SOCKET
from weir.model.device_check import read_gpu
from weir.model.device_sizes import max_num_seqs_on_gpu
from weir.policy.registry import PolicySpec
from weir.runtime.config import ServiceConfig, setting

_CPU_NUM_SEQS = 32
_GROUP = re.compile(r"[a-z0-9_-]{0,32}")


@dataclass(frozen=True)
class WorkerConfig(ServiceConfig):
    """Bounds of a step, of waiting, and of what a worker may use of its machine."""

    arena_socket: str = setting("", "Unix socket of the host's transfer service. Empty: arena.sock of the instance.")
    max_num_seqs: int = setting(0, "Sequences in the batch. 0: 32, on a GPU what its memory is good for.")
    max_num_batched_tokens: int = setting(2048, "Tokens computed in a step, all sequences together.")
    chunk_tokens: int = setting(512, "Tokens of one prompt computed in a step.")
    max_context_tokens: int = setting(0, "As the transfer service has it: some models rotate by it. 0: the model's.")
    target_step_ms: float = setting(100.0, "Steps get no more prompt tokens than last about so long. 0: all that fit.")
    max_stall_s: float = setting(5.0, "A sequence that gets no page for this long fails.")
    async_scheduling: str = setting("auto", "Launch a step while one runs: on, off, or auto, which is on on a GPU.")
    num_threads: int = setting(0, "Threads of the forward pass. 0: int8 what busy workers leave, fp32 an equal share.")
    group: str = setting("", "Lanes that name this group have the worker to themselves. Empty: it serves any lane.")
    policy: str = setting("", "NAME or NAME:KEY=VALUE,…: makes the batches until the scheduler chooses one.")
    is_spare: bool = setting(False, "It starts drained, and takes work once it is told to, as by the planner.")
    workers_on_machine: int = setting(1, "Workers that share this machine's cores, this one among them.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, smallest in (
            ("max_num_seqs", 0),
            ("max_num_batched_tokens", 1),
            ("chunk_tokens", 1),
            ("max_context_tokens", 0),
            ("num_threads", 0),
            ("workers_on_machine", 1),
        ):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {smallest}")
        if self.async_scheduling not in ("auto", "on", "off"):
            raise ValueError(f"async_scheduling {self.async_scheduling!r}: must be auto, on or off")
        if self.async_scheduling == "on" and self.device == "cpu":
            raise ValueError(
                "async_scheduling on: steps run in the engine's own threads with device cpu; set it to auto"
            )
        if self.policy:
            PolicySpec.parse(self.policy)
        if not _GROUP.fullmatch(self.group):
            raise ValueError(f"group {self.group!r}: must be at most 32 characters of a-z 0-9 _ -")
        if not 0 <= self.target_step_ms <= 600_000:
            raise ValueError(f"target_step_ms {self.target_step_ms:g}: must be in [0, 600000]; 0 is no target")
        if not 0 < self.max_stall_s <= 600:
            raise ValueError(f"max_stall_s {self.max_stall_s}: must be in (0, 600]")

    @property
    def most_num_seqs(self) -> int:
        """What `max_num_seqs` comes to on this machine. Raises CudaDriverError if its GPU cannot be asked."""
        if self.max_num_seqs:
            return self.max_num_seqs
        if self.device != "cuda":
            return _CPU_NUM_SEQS
        return max_num_seqs_on_gpu(read_gpu(CudaDriver.load()).total_bytes)

    @property
    def is_async_scheduling(self) -> bool:
        return self.async_scheduling == "on" or (self.async_scheduling == "auto" and self.device == "cuda")

    @property
    def arena_socket_path(self) -> Path:
        return Path(self.arena_socket) if self.arena_socket else self.instance_dir / "arena.sock"

    @property
    def weights_socket_path(self) -> Path:
        """Where the transfer service shares the weights on a device."""
        return self.arena_socket_path.with_name(WEIGHTS_SOCKET)

    @property
    def core_budget_path(self) -> Path:
        """The file that all workers of this machine share, whatever instance they belong to."""
        return self.runtime_dir / "cores"
