"""Mistakes made on purpose: each is found, by the check that is there for it."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import helm_python
import pytest
from tests.kubernetes import checks
from tests.kubernetes.chart import RELEASE, Object, Objects, render, rendered, values_of
from tests.kubernetes.network import check_network
from tests.kubernetes.schemas import check_schemas

Check = Callable[[Objects], list[str]]
Mistake = Callable[[Objects], None]


def host(objects: Objects) -> Object:
    return objects.one("StatefulSet", f"{RELEASE}-host")


def pod_of(objects: Objects, kind: str = "StatefulSet", name: str = f"{RELEASE}-host") -> Object:
    spec: Object = objects.one(kind, name)["spec"]["template"]["spec"]
    return spec


def weir(objects: Objects) -> Object:
    container: Object = pod_of(objects)["containers"][0]
    return container


def gateway(objects: Objects) -> Object:
    container: Object = pod_of(objects, "Deployment", f"{RELEASE}-gateway")["containers"][0]
    return container


def misspelt_field(objects: Objects) -> None:
    spec = pod_of(objects)
    spec["terminationGracePeriodSecond"] = spec.pop("terminationGracePeriodSeconds")


def port_as_text(objects: Objects) -> None:
    weir(objects)["ports"][0]["containerPort"] = "9460"


def unknown_kind(objects: Objects) -> None:
    objects.one("PodDisruptionBudget", f"{RELEASE}-host")["apiVersion"] = "policy/v1beta1"


def field_that_a_definition_lacks(objects: Objects) -> None:
    objects.one("ScaledObject", f"{RELEASE}-host")["spec"]["maxReplicas"] = 3


def probe_of_an_undeclared_port(objects: Objects) -> None:
    weir(objects)["livenessProbe"]["httpGet"]["port"] = "health"


def service_of_an_undeclared_port(objects: Objects) -> None:
    objects.one("Service", f"{RELEASE}-gateway")["spec"]["ports"][0]["targetPort"] = "web"


def liveness_by_others(objects: Objects) -> None:
    weir(objects)["livenessProbe"]["httpGet"]["path"] = "/ready"


def no_startup_probe(objects: Objects) -> None:
    del gateway(objects)["startupProbe"]


def port_that_nobody_listens_on(objects: Objects) -> None:
    for port in weir(objects)["ports"]:
        if port["name"] == "page-streams":
            port["containerPort"] = 7001


def selector_of_others(objects: Objects) -> None:
    objects.one("Service", f"{RELEASE}-gateway")["spec"]["selector"]["app.kubernetes.io/component"] = "gateways"


def labels_that_its_controller_does_not_select(objects: Objects) -> None:
    host(objects)["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/instance"] = "other"


def grace_too_short(objects: Objects) -> None:
    pod_of(objects)["terminationGracePeriodSeconds"] = 120


def grace_that_forgets_pre_stop(objects: Objects) -> None:
    gateway(objects)["lifecycle"]["preStop"]["exec"]["command"][1] = "60"


def no_arena(objects: Objects) -> None:
    mounts = weir(objects)["volumeMounts"]
    mounts.remove(next(one for one in mounts if one["mountPath"] == "/dev/shm"))


def arena_on_disk(objects: Objects) -> None:
    volume = next(one for one in pod_of(objects)["volumes"] if one["name"] == "arena")
    del volume["emptyDir"]["medium"]


def arena_that_does_not_count(objects: Objects) -> None:
    weir(objects)["resources"]["limits"]["memory"] = "1024Mi"


def unknown_flag(objects: Objects) -> None:
    weir(objects)["args"] += ["--prefil", "2"]


def unknown_flag_of_a_service(objects: Objects) -> None:
    gateway(objects)["args"] += ["--http-prot", "8000"]


def unknown_variable(objects: Objects) -> None:
    gateway(objects)["env"].append({"name": "WEIR_MAX_REQUEST", "value": "10"})


def unknown_setting(objects: Objects) -> None:
    files: Any = objects.configuration
    files["weir.toml"] = files["weir.toml"].replace("http_port =", "http_prot =")


def no_mount_of_credentials(objects: Objects) -> None:
    mounts = gateway(objects)["volumeMounts"]
    mounts.remove(next(one for one in mounts if one["name"] == "credentials"))


def policy_without_the_data_port(objects: Objects) -> None:
    rule = objects.one("NetworkPolicy", f"{RELEASE}-host")["spec"]["ingress"][0]
    rule["ports"] = [port for port in rule["ports"] if port["port"] != 7020]


def policy_for_everybody(objects: Objects) -> None:
    objects.one("NetworkPolicy", f"{RELEASE}-nats")["spec"]["ingress"][0]["from"] = []


def no_default_denial(objects: Objects) -> None:
    objects.remove("NetworkPolicy", f"{RELEASE}-deny")


def root(objects: Objects) -> None:
    pod_of(objects)["securityContext"]["runAsUser"] = 0


def capability(objects: Objects) -> None:
    weir(objects)["securityContext"]["capabilities"]["add"] = ["SYS_PTRACE"]


def token_of_the_cluster(objects: Objects) -> None:
    pod_of(objects)["automountServiceAccountToken"] = True


def secret_on_a_command_line(objects: Objects) -> None:
    source = {"secretKeyRef": {"name": "keys", "key": "key"}}
    gateway(objects)["env"].append({"name": "WEIR_API_KEY", "valueFrom": source})
    gateway(objects)["args"] += ["--nats-url", "nats://$(WEIR_API_KEY)@nats:4222"]


def secret_in_the_environment(objects: Objects) -> None:
    source = {"secretKeyRef": {"name": "seed", "key": "seed"}}
    weir(objects)["env"].append({"name": "NATS_SEED", "valueFrom": source})


def password_in_the_configuration(objects: Objects) -> None:
    files: Any = objects.configuration
    files["weir.toml"] = files["weir.toml"].replace("tls://", "tls://weir:secret@")


def no_budget(objects: Objects) -> None:
    objects.remove("PodDisruptionBudget", f"{RELEASE}-gateway")


def figure_that_is_not_there(objects: Objects) -> None:
    trigger = objects.one("ScaledObject", f"{RELEASE}-host")["spec"]["triggers"][0]
    trigger["metadata"]["query"] = "sum(weir_queue_length)"


MISTAKES: tuple[tuple[Check, Mistake], ...] = (
    (check_schemas, misspelt_field),
    (check_schemas, port_as_text),
    (check_schemas, unknown_kind),
    (check_schemas, field_that_a_definition_lacks),
    (checks.check_ports, probe_of_an_undeclared_port),
    (checks.check_ports, service_of_an_undeclared_port),
    (checks.check_probes, liveness_by_others),
    (checks.check_probes, no_startup_probe),
    (checks.check_listened, port_that_nobody_listens_on),
    (checks.check_selectors, selector_of_others),
    (checks.check_selectors, labels_that_its_controller_does_not_select),
    (checks.check_grace, grace_too_short),
    (checks.check_grace, grace_that_forgets_pre_stop),
    (checks.check_arena, no_arena),
    (checks.check_arena, arena_on_disk),
    (checks.check_arena, arena_that_does_not_count),
    (checks.check_settings, unknown_flag),
    (checks.check_settings, unknown_flag_of_a_service),
    (checks.check_settings, unknown_variable),
    (checks.check_settings, unknown_setting),
    (checks.check_mounts, no_mount_of_credentials),
    (check_network, policy_without_the_data_port),
    (check_network, policy_for_everybody),
    (check_network, no_default_denial),
    (checks.check_security, root),
    (checks.check_security, capability),
    (checks.check_security, token_of_the_cluster),
    (checks.check_secrets, secret_on_a_command_line),
    (checks.check_secrets, secret_in_the_environment),
    (checks.check_secrets, password_in_the_configuration),
    (checks.check_budgets, no_budget),
    (checks.check_figures, figure_that_is_not_there),
)


@cache
def _everything() -> list[Object]:
    return render({**values_of("tls"), "autoscaling": {"enabled": True}})


def everything() -> Objects:
    """With what only some values files have."""
    return Objects(copy.deepcopy(_everything()))


@pytest.mark.parametrize(("check", "mistake"), MISTAKES, ids=lambda one: one.__name__)
def test_a_mistake_is_found(check: Check, mistake: Mistake) -> None:
    objects = everything()
    assert check(objects) == []
    mistake(objects)
    assert check(objects) != []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hosts": {"replica": 3}}, "replica"),
        ({"hosts": {"replicas": "3"}}, "replicas"),
        ({"hosts": {"arena": "2GB"}}, "arena"),
        ({"hosts": {"gpu": {"count": 2}}}, "count"),
        ({"nats": {"replicas": 2}}, "replicas"),
        ({"nats": {"url": "nats://user:password@host:4222"}}, "url"),
        ({"gateway": {}}, "gateway"),
        ({"instance": "Prod"}, "instance"),
        ({"credentials": {"source": "vault"}}, "source"),
        ({"credentials": {"source": ""}}, "credentials.source: must be chosen"),
    ],
)
def test_values_that_mean_nothing_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said):
        render({**values_of("minimal"), **wrong})
    assert rendered("minimal").all, "and those that mean something are not"
