"""A stack of processes that meet by TCP and prove who they are, started where `tests.attacks.networks` says.

    python -m tests.attacks.defender FOLDER HOST

Prints what of it a stranger can know, as JSON, when it is ready, and ends with its standard input.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.hosts import Cluster
from tests.e2e.certified import Lab

from weir.core.credentials import key_digest, make_key


@dataclass(frozen=True, slots=True)
class Defended:
    """`lab`: the folder of the authority, from which some attempts have certificates that somebody has stolen."""

    lab: str
    instance: str
    host: str
    gateway_id: str
    addresses: dict[str, str]
    """Of one process of each role, and of NATS."""
    http_port: int

    @property
    def ports(self) -> set[int]:
        return {self.http_port, *(int(address.rpartition(":")[2]) for address in self.addresses.values())}


def main() -> None:
    folder, host = Path(sys.argv[1]), sys.argv[2]
    lab = Lab(folder / "lab", host)
    limits = folder / "limits.toml"
    limits.write_text(f'[tenants.other]\napi_key_digests = ["{key_digest(make_key()).hex()}"]\n')
    run = folder / "run"
    run.mkdir(mode=0o700)
    with Cluster(run, certified=lab, listen_host=host, environ={"WEIR_LIMITS_FILE": str(limits)}) as cluster:
        workers = cluster.add_host("one").workers
        addresses = {
            "prefill": workers[0].address,
            "decode": workers[1].address,
            "scheduler": cluster.schedulers[0].address,
            "gateway": cluster.grpc_address,
            "nats": cluster.nats_url.removeprefix("nats://"),
        }
        gateway_id = json.loads((run / "gateway-0.ready.json").read_text())["process_id"]
        defended = Defended(str(lab.folder), cluster.instance, host, gateway_id, addresses, cluster.http_port)
        print(json.dumps(asdict(defended)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
