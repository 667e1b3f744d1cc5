"""What must hold of a pod and of what refers to it: each check returns its problems, none where all is well."""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from tests.guard.sources import ROOT
from tests.kubernetes.chart import Object, Objects, Pod
from tests.kubernetes.commands import Command, WrongCommand, command_of

_MARGIN_S = 20.0
"""From the end of the work to that of the last process."""
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_SECRETS_IN_ENVIRON = {"WEIR_API_KEY", "WEIR_BATCH_STORE"}
"""That the product takes from no file."""
_WITH_PASSWORD = re.compile(r"://[^/\s]*@")
_OF_COMPONENTS = ("host", "scheduler", "gateway")


def check_ports(objects: Objects) -> list[str]:
    """Probes, Services and PodMonitors name ports that the containers declare."""
    problems = []
    for pod in objects.pods():
        for container in pod.containers:
            declared = {
                str(value) for port in container.get("ports", []) for value in (port["name"], port["containerPort"])
            }
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = container.get(probe, {}).get("httpGet", {}).get("port")
                if asked is not None and str(asked) not in declared:
                    problems.append(
                        f"{pod.name}: {probe} asks port {asked}, which {container['name']} does not declare"
                    )
    for service in objects.of("Service"):
        for pod in objects.selected(service["spec"]["selector"]):
            named = _names(pod)
            problems += [
                f"Service {service['metadata']['name']}: no port {port['targetPort']} in {pod.name}"
                for port in service["spec"]["ports"]
                if port["targetPort"] not in named
            ]
    for monitor in objects.of("PodMonitor"):
        for pod in objects.selected(monitor["spec"]["selector"]["matchLabels"]):
            asked = {end["port"] for end in monitor["spec"]["podMetricsEndpoints"]}
            problems += [f"PodMonitor: no port {port} in {pod.name}" for port in sorted(asked - _names(pod).keys())]
    return problems


def _names(pod: Pod) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for one in pod.containers for port in one.get("ports", [])}


def check_probes(objects: Objects) -> list[str]:
    """All that runs for long is asked whether it started, serves and lives, and the last by its own loop alone."""
    problems = []
    for pod in objects.pods():
        if pod.owner is None:
            continue
        for container in pod.spec["containers"]:
            asked = {
                name: container.get(f"{name}Probe", {}).get("httpGet", {}).get("path")
                for name in ("startup", "readiness", "liveness")
            }
            if None in asked.values():
                problems.append(f"{pod.name}: {container['name']} lacks a probe: {asked}")
            if pod.component in _OF_COMPONENTS and asked["liveness"] != "/live":
                problems.append(f"{pod.name}: liveness asks {asked['liveness']}: others' deaths would restart it")
    return problems


def check_listened(objects: Objects) -> list[str]:
    """Every declared port is one that the command listens on, and the other way round."""
    problems = []
    for pod, container, command in _commands(objects):
        declared = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        listened = {} if command is None else dict(command.ports)
        if declared != listened:
            problems.append(f"{pod.name}: {container['name']} declares {declared} and listens on {listened}")
    return problems


def check_settings(objects: Objects) -> list[str]:
    """Every flag, variable and line of the file is a setting, with a value that it takes."""
    problems = []
    for pod in objects.pods():
        for container in pod.containers:
            try:
                command_of(container, objects)
            except WrongCommand as error:
                problems.append(f"{pod.name}: {error}")
    return problems


def _commands(objects: Objects) -> Iterator[tuple[Pod, Object, Command | None]]:
    """Those that can be read: `check_settings` tells the others."""
    for pod in objects.pods():
        for container in pod.containers:
            try:
                yield pod, container, command_of(container, objects)
            except WrongCommand:
                continue


def check_selectors(objects: Objects) -> list[str]:
    """Whatever selects pods selects some, and a controller its own."""
    problems = []
    for pod in objects.pods():
        if pod.owner is not None and not pod.owner["spec"]["selector"]["matchLabels"].items() <= pod.labels.items():
            problems.append(f"{pod.owner['kind']} {pod.name} does not select its own pods")
    for kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor"):
        for one in objects.of(kind):
            if not objects.selected(_selector(one)):
                problems.append(f"{kind} {one['metadata']['name']} selects nothing: {_selector(one)}")
    for one in objects.of("ScaledObject"):
        target = one["spec"]["scaleTargetRef"]
        if target["name"] not in {found["metadata"]["name"] for found in objects.of(target["kind"])}:
            problems.append(f"ScaledObject scales {target['name']}, which is not there")
    return problems


def _selector(one: Object) -> Mapping[str, str]:
    found = one["spec"].get("selector") or one["spec"].get("podSelector") or {}
    labels: Mapping[str, str] = found.get("matchLabels", {}) if one["kind"] != "Service" else found
    return labels


def check_grace(objects: Objects) -> list[str]:
    """Kubernetes kills no process that drains: preStop counts among the seconds that a pod has."""
    problems = []
    for pod, container, command in _commands(objects):
        if command is None or pod.owner is None:
            continue
        stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        needed_s = command.grace_s + _MARGIN_S + (float(stop[1]) if stop[:1] == ["sleep"] else 0.0)
        given_s = pod.spec.get("terminationGracePeriodSeconds", 30)
        if given_s < needed_s:
            problems.append(f"{pod.name}: has {given_s} s to end, and {container['name']} may take {needed_s:g}")
    return problems


def check_arena(objects: Objects) -> list[str]:
    """What runs a host's processes has one /dev/shm in memory, which counts in its limit."""
    problems = []
    for pod in objects.pods():
        for container in pod.spec["containers"]:
            if container["command"][:2] != ["weir", "host"]:
                continue
            mounts = [one for one in container["volumeMounts"] if one["mountPath"] == "/dev/shm"]
            volumes = [(pod.volume(one["name"]) or {}).get("emptyDir", {}) for one in mounts]
            if len(volumes) != 1 or volumes[0].get("medium") != "Memory" or not volumes[0].get("sizeLimit"):
                problems.append(
                    f"{pod.name}: {container['name']} must have one /dev/shm in memory, bounded; has {volumes}"
                )
            elif _bytes(container["resources"]["limits"]["memory"]) <= _bytes(volumes[0]["sizeLimit"]):
                problems.append(f"{pod.name}: the arena alone fills the limit of memory of {container['name']}")
    return problems


def _bytes(size: str) -> int:
    return int(size[:-2]) * _UNITS[size[-2:]]


def check_mounts(objects: Objects) -> list[str]:
    """Every mount has its volume and every volume a mount; files that settings name lie in one."""
    problems = []
    for pod in objects.pods():
        used = {mount["name"] for container in pod.containers for mount in container.get("volumeMounts", [])}
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        problems += [f"{pod.name}: no volume {name}" for name in sorted(used) if pod.volume(name) is None]
        problems += [f"{pod.name}: volume {name} is mounted nowhere" for name in sorted(volumes - used)]
    for pod, container, command in _commands(objects):
        for path in () if command is None else command.files:
            if not _is_there(path, pod, container, objects):
                problems.append(f"{pod.name}: {container['name']} is to read {path}, which is in no mount")
    return problems


def _is_there(path: str, pod: Pod, container: Object, objects: Objects) -> bool:
    """Of a Secret that is mounted whole every file is taken to be there: test_secrets.py looks at those."""
    for mount in container.get("volumeMounts", []):
        if not PurePosixPath(path).is_relative_to(mount["mountPath"]):
            continue
        name, volume = path.removeprefix(mount["mountPath"]).strip("/"), pod.volume(mount["name"]) or {}
        if not name or "secret" in volume:
            return True
        if "configMap" in volume:
            return name in objects.configuration
        sources = [source["secret"] for source in volume.get("projected", {}).get("sources", [])]
        return any("items" not in one or name in {item["path"] for item in one["items"]} for one in sources)
    return False


def check_security(objects: Objects) -> list[str]:
    """No root, no capability, no way to one, no token of the cluster."""
    problems = []
    for pod in objects.pods():
        of_pod = pod.spec.get("securityContext", {})
        wanted = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        if of_pod.get("runAsUser", 0) == 0 or not wanted.items() <= of_pod.items():
            problems.append(f"{pod.name}: may run as root, or without seccomp: {of_pod}")
        if pod.spec.get("automountServiceAccountToken") is not False:
            problems.append(f"{pod.name}: has a token of the cluster")
        if pod.spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}:
            problems.append(f"{pod.name}: shares namespaces of its node")
        for container in pod.containers:
            own = container.get("securityContext", {})
            strict = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            if not strict.items() <= own.items() or own.get("privileged") or own.get("runAsUser", 1) == 0:
                problems.append(f"{pod.name}: {container['name']} could get privileges: {own}")
            if own.get("readOnlyRootFilesystem") is not True and not _has_gpu(container):
                problems.append(f"{pod.name}: {container['name']} may write into its image")
    return problems


def _has_gpu(container: Object) -> bool:
    return any("/" in name for name in container["resources"].get("limits", {}))


def check_secrets(objects: Objects) -> list[str]:
    """Nothing secret in a command line, nor in the environment where a file would do."""
    problems = []
    for pod in objects.pods():
        for container in pod.containers:
            env = container.get("env", [])
            of_secret = {one["name"] for one in env if "secretKeyRef" in one.get("valueFrom", {})}
            problems += [
                f"{pod.name}: {name} is a Secret in the environment" for name in sorted(of_secret - _SECRETS_IN_ENVIRON)
            ]
            words = " ".join([*container.get("command", []), *container.get("args", [])])
            problems += [
                f"{pod.name}: $({name}) puts a Secret on a command line" for name in of_secret if f"$({name})" in words
            ]
            told = [words, *(str(one.get("value", "")) for one in env)]
            problems += [f"{pod.name}: a password in {text!r}" for text in told if _WITH_PASSWORD.search(text)]
    for name, text in objects.configuration.items():
        if _WITH_PASSWORD.search(text) or "SUA" in text or "PRIVATE KEY" in text:
            problems.append(f"ConfigMap: {name} has a password or a key")
    return problems


def check_budgets(objects: Objects) -> list[str]:
    """Of whatever has replicas one at most is taken at a time."""
    covered = {pod.name for one in objects.of("PodDisruptionBudget") for pod in objects.selected(_selector(one))}
    return [f"{pod.name}: no PodDisruptionBudget" for pod in objects.pods() if pod.owner and pod.name not in covered]


def check_figures(objects: Objects) -> list[str]:
    """What is scaled by is documented."""
    documented = set(re.findall(r"`(weir_\w+)`", (ROOT / "shared" / "docs" / "metrics.md").read_text()))
    queries = [
        trigger["metadata"]["query"] for one in objects.of("ScaledObject") for trigger in one["spec"]["triggers"]
    ]
    named = {name for query in queries for name in re.findall(r"weir_\w+", query)}
    return [f"ScaledObject: {name} is no figure of metrics.md" for name in sorted(named - documented)]
