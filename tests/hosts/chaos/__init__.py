"""Two hosts amid faults. Here, before anything imports gRPC, since a host may die as something starts in it: then vfork
fails, Python falls back to fork, and the handlers that gRPC registers for that abort in a dead namespace of PIDs.
"""

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
