"""What a worker does: it computes prompts, or answers."""

from typing import Literal

WorkerRole = Literal["prefill", "decode"]
WORKER_ROLES: tuple[WorkerRole, WorkerRole] = ("prefill", "decode")
