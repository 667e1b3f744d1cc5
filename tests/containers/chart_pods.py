"""The pods of the Helm chart in containers, as a kubelet would make them.

Their commands, settings, Secrets, probes, user, limits and volumes are those of the rendered objects, and volumes have
the modes that a kubelet gives them. Not as on a cluster: nothing schedules, Services are names of Compose's network,
policies are not enforced, and preStop does not run.
"""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from tests.containers.checks import ANSWER, Seen, Wrong, ask_http
from tests.containers.parts import UID, Part, give_to_image, weir
from tests.containers.stack import ROOT, ComposeStack
from tests.containers.two_hosts import TOPICS, ask
from tests.kubernetes.chart import CHART, NAMESPACE, Objects, Pod, render

_VALUES: Mapping[str, Any] = {
    "credentials": {"source": "secret"},
    "hosts": {"replicas": 2, "arena": "512Mi", "memory": "3Gi", "graceSeconds": 30},
    "gateways": {"replicas": 1},
    "schedulers": {"replicas": 1},
    "logFormat": "text",
    "settings": {"prefill": {"num_threads": 1}, "decode": {"num_threads": 1, "max_num_seqs": 2}},
}
_VOLUME_MODE = "mode=2777,uid=0,gid=10001"
"""Of an emptyDir in a pod with an fsGroup."""
_FILE = "compose.json"
_TIMEOUT_S = 300.0
_ELECTION_S = 10.0


class ChartPods(Part):
    """Two hosts, a gateway, a scheduler and three NATS servers."""

    name = "chart"
    left_out = ()
    healthy = "two hosts, a gateway, a scheduler, three NATS servers, ready by the chart's own probes:"

    def __init__(self) -> None:
        self._folder = Path()
        self._pods: list[tuple[Pod, str]] = []
        self.files = ()

    def prepare(self, folder: Path) -> Mapping[str, str]:
        objects = Objects(render(_VALUES))
        self._folder = folder
        self._pods = [
            (pod, f"{pod.name}-{index}")
            for pod in objects.pods()
            if pod.owner is not None
            for index in range(pod.owner["spec"]["replicas"])
        ]
        _write_files(folder, objects)
        services = {name: _service(pod, name, objects, folder) for pod, name in self._pods}
        volumes = {f"{name}-{volume}": options for pod, name in self._pods for volume, options in _volumes(pod).items()}
        document = {"name": "weir-chart", "services": services, "volumes": volumes}
        (folder / _FILE).write_text(json.dumps(document, indent=1))
        self.files = (str(folder / _FILE),)
        return {}

    def before_up(self, stack: ComposeStack) -> None:
        """Init containers; and NATS: a scheduler gives up while its servers elect a leader. A kubelet would start it
        again; Compose takes that for a failure."""
        for pod, name in self._pods:
            for container in pod.spec.get("initContainers", []):
                cache = self._folder / "caches" / name
                cache.mkdir(parents=True)
                os.chown(cache, 0, UID)
                cache.chmod(0o2777)
                options = ("--user", f"{UID}:{UID}", "--read-only", "--cap-drop", "ALL", "--network", "none")
                stack.docker(
                    "run", "--rm", *options, "--volume", f"{cache}:/cache", "weir:local", *container["command"]
                )

        servers = [name for pod, name in self._pods if pod.component == "nats"]
        stack.compose("up", "-d", "--wait", *servers, timeout_s=_TIMEOUT_S)
        time.sleep(_ELECTION_S)

    def check(self, stack: ComposeStack) -> Iterator[Seen]:
        if (text := ask_http(stack.ports.http)) != ANSWER:
            raise Wrong(f"not {ANSWER!r}: {text!r}")
        yield Seen("greedy text by HTTP through the gateway", f"{ANSWER[:7]!r}…, as outside containers")
        prompts = [f"{word} and {number} things that follow from it:" for number in range(2) for word in TOPICS]
        expected = ask(stack, prompts, max_tokens=48)
        for what, service, act in (
            ("SIGTERM to a host, as when its pod is deleted", "weir-host-1", "stop"),
            ("`kill -9` of a NATS server", "weir-nats-0", "kill"),
        ):
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(ask, stack, prompts, max_tokens=48)
                time.sleep(1)
                began_s = time.monotonic()
                stack.compose(act, service, timeout_s=_TIMEOUT_S)
                took_s = time.monotonic() - began_s
                if asking.result(_TIMEOUT_S) != expected:
                    raise Wrong(f"{what}: answers were others")
            yield Seen(
                f"{what}, during {len(prompts)} requests", f"all answered, the same text; gone after {took_s:.0f} s"
            )
        if (text := ask_http(stack.ports.http)) != ANSWER:
            raise Wrong(f"with one host and two NATS servers: {text!r}")
        yield Seen("greedy text with one host and two NATS servers", "as before")


def _write_files(folder: Path, objects: Objects) -> None:
    """ConfigMap and Secrets, as the chart and its script make them."""
    (folder / "settings").mkdir()
    for name, text in objects.configuration.items():
        (folder / "settings" / name).write_text(text)
    made = folder / "credentials"
    weir("up", "--hosts", str(CHART / "hosts.toml"), "--out", str(made))
    command = [sys.executable, str(CHART / "make_secrets.py"), str(made)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120).stdout
    for secret in yaml.safe_load_all(printed):
        own = folder / "secrets" / secret["metadata"]["name"]
        own.mkdir(parents=True)
        for name, content in secret["data"].items():
            (own / name).write_bytes(base64.b64decode(content))
            (own / name).chmod(0o440)
    give_to_image(folder / "secrets")
    folder.chmod(0o711)


def _service(pod: Pod, name: str, objects: Objects, folder: Path) -> dict[str, Any]:
    """Of a container, without what it waits for."""
    [container] = pod.spec["containers"]
    words = [*container["command"], *container.get("args", [])]
    if any("$(POD_IP)" in word for word in words):
        line = " ".join(word.replace("$(POD_IP)", '"$$POD_IP"') for word in words)
        words = ["sh", "-c", f"export POD_IP=$$(hostname -i); exec {line}"]
    environ = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
    service = {
        "image": "weir:local" if pod.component != "nats" else container["image"],
        "pull_policy": "never",
        "hostname": name,
        "restart": "unless-stopped",
        "user": f"{UID}:{UID}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "entrypoint": words,
        "environment": {**environ, "POD_NAME": name},
        "volumes": [_mount(pod, name, mount, folder) for mount in container["volumeMounts"]],
        "healthcheck": {"test": _probe(pod, container), "interval": "5s", "timeout": "10s", "retries": 60},
        "stop_grace_period": f"{pod.spec['terminationGracePeriodSeconds']}s",
        "mem_limit": container["resources"]["limits"]["memory"].replace("i", "").lower(),
        "networks": {"default": {"aliases": _aliases(pod, name, objects)}},
    }
    if pod.component == "gateway":
        service["ports"] = ["127.0.0.1:${HTTP_PORT}:8000"]
    return service


def _probe(pod: Pod, container: Mapping[str, Any]) -> list[str]:
    asked = container["readinessProbe"]["httpGet"]
    port = next(port["containerPort"] for port in container["ports"] if port["name"] == asked["port"])
    if pod.component == "nats":
        return ["CMD", "wget", "-q", "-O", "/dev/null", f"http://127.0.0.1:{port}{asked['path']}"]
    return ["CMD-SHELL", f"exec python3 /opt/weir/healthcheck.py http://$$(hostname -i):{port}{asked['path']}"]


def _aliases(pod: Pod, name: str, objects: Objects) -> list[str]:
    services = [one for one in objects.of("Service") if pod in objects.selected(one["spec"]["selector"])]
    names = [one["metadata"]["name"] for one in services]
    headless = [one["metadata"]["name"] for one in services if one["spec"].get("clusterIP") == "None"]
    return [*names, *(f"{name}.{one}" for one in headless), *(f"{name}.{one}.{NAMESPACE}.svc" for one in headless)]


def _mount(pod: Pod, name: str, mount: Mapping[str, Any], folder: Path) -> str | dict[str, Any]:
    volume = pod.volume(mount["name"]) or {}
    target = mount["mountPath"]
    if "configMap" in volume:
        return f"{folder}/settings:{target}:ro"
    if "projected" in volume:
        [source] = volume["projected"]["sources"]
        return f"{folder}/secrets/{source['secret']['name']}:{target}:ro"
    if "subPath" in mount:
        return f"{folder}/caches/{name}/{mount['subPath']}:{target}"
    return f"{name}-{mount['name']}:{target}:nocopy"


def _volumes(pod: Pod) -> dict[str, Any]:
    """Empty ones, in memory all; claims too."""
    claims = pod.owner["spec"].get("volumeClaimTemplates", []) if pod.owner is not None else []
    empty = {volume["name"]: volume["emptyDir"] for volume in pod.spec["volumes"] if "emptyDir" in volume}
    empty |= {claim["metadata"]["name"]: {} for claim in claims}
    found = {}
    for name, source in empty.items():
        if name == "cache":
            continue
        size = f"size={source['sizeLimit'].replace('i', '').lower()}," if source.get("medium") == "Memory" else ""
        options = {"type": "tmpfs", "device": "tmpfs", "o": f"{size}{_VOLUME_MODE}"}
        found[name] = {"driver": "local", "driver_opts": options}
    return found
