"""Whether network policies let through what must pass, and nothing without a name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.chart import Object, Objects, Pod
from tests.kubernetes.commands import command_of

_NAMESPACE_LABEL = "kubernetes.io/metadata.name"
_DNS_PORT = 53


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end. `namespace`: empty: the release's."""

    labels: Mapping[str, str]
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Connection:
    """`source` and `target`: components of the release, or namespaces of others."""

    source: str
    target: str
    port: int


def check_network(objects: Objects) -> list[str]:
    policies = objects.of("NetworkPolicy")
    problems = list(_open_rules(policies))
    if not any(_is_denial(policy) for policy in policies):
        problems.append("no policy denies by default")
    for connection in _needed(objects):
        problems += [
            f"{connection.source} does not reach {connection.target}:{connection.port}: {direction} is not allowed"
            for direction in _denied(connection, objects)
        ]
    return problems


def _open_rules(policies: list[Object]) -> Iterator[str]:
    """A rule without peers is for everybody."""
    for policy in policies:
        for direction, key in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"].get(direction, []):
                if not rule.get(key) or not rule.get("ports"):
                    yield f"NetworkPolicy {policy['metadata']['name']}: {direction} for all, or at all ports: {rule}"


def _is_denial(policy: Object) -> bool:
    spec = policy["spec"]
    return (
        set(spec["policyTypes"]) == {"Ingress", "Egress"}
        and not spec.get("ingress")
        and "component" not in str(spec["podSelector"])
    )


def _needed(objects: Objects) -> Iterator[Connection]:
    ports = {pod.component: _ports(pod, objects) for pod in objects.pods()}
    pages = [port for name, port in ports["host"].items() if name.startswith("page")]
    yield from (Connection("host", "host", port) for port in pages)
    workers = [port for name, port in ports["host"].items() if name.startswith(("prefill-", "decode-"))]
    yield from (Connection("gateway", "host", port) for port in workers)
    yield Connection("gateway", "scheduler", ports["scheduler"]["grpc"])
    yield Connection("test", "gateway", ports["gateway"]["grpc"])
    if "nats" in ports:
        yield from (Connection(one, "nats", ports["nats"]["nats"]) for one in ("host", "scheduler", "gateway"))
    if "cluster" in ports.get("nats", {}):
        yield Connection("nats", "nats", ports["nats"]["cluster"])
    for component in ("host", "scheduler", "gateway"):
        shown = [port for name, port in ports[component].items() if name.startswith("metrics")]
        yield from (Connection("monitoring", component, port) for port in shown)
        yield Connection(component, "kube-system", _DNS_PORT)


def _ports(pod: Pod, objects: Objects) -> Mapping[str, int]:
    command = command_of(pod.spec["containers"][0], objects)
    return {} if command is None else command.ports


def _denied(connection: Connection, objects: Objects) -> Iterator[str]:
    source, target = objects.pod(connection.source), objects.pod(connection.target)
    if target is not None and not _allows(
        objects, target, "ingress", "from", _peer(connection.source, source), connection.port
    ):
        yield "ingress"
    if source is not None and not _allows(
        objects, source, "egress", "to", _peer(connection.target, target), connection.port
    ):
        yield "egress"


def _peer(name: str, pod: Pod | None) -> Peer:
    return Peer({}, name) if pod is None else Peer(pod.labels)


def _allows(objects: Objects, pod: Pod, direction: str, key: str, peer: Peer, port: int) -> bool:
    for policy in objects.of("NetworkPolicy"):
        selector = policy["spec"]["podSelector"].get("matchLabels", {})
        if not selector.items() <= pod.labels.items():
            continue
        for rule in policy["spec"].get(direction, []):
            is_peer = any(_matches(one, peer) for one in rule.get(key, []))
            if is_peer and any(_has_port(one, port) for one in rule.get("ports", [])):
                return True
    return False


def _matches(rule: Mapping[str, Any], peer: Peer) -> bool:
    if "ipBlock" in rule:
        return False
    namespaces = rule.get("namespaceSelector")
    if peer.namespace and (namespaces is None or not _fits(namespaces, {_NAMESPACE_LABEL: peer.namespace})):
        return False
    if not peer.namespace and namespaces is not None:
        return False
    return _fits(rule.get("podSelector", {}), peer.labels)


def _fits(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def _has_port(rule: Mapping[str, Any], port: int) -> bool:
    return int(rule["port"]) <= port <= int(rule.get("endPort", rule["port"]))
