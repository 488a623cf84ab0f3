"""The Helm chart: what it renders is valid, hangs together, is read by our processes, and grants no
more than they need."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from activator.settings import ActivatorSettings
from pilotlight.controller.kubernetes.orphaned_journals import OrphanedJournal, drain_job
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.dashboard.dashboard_origin import read_dashboard_origin
from pilotlight.core.settings import PlatformSettings, load_named_records, load_section
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.quotas import BUILT_IN_PLANS, Plan
from scripts import render_kustomize
from scripts.chart_schema import SECTIONS, schema
from scripts.render_kustomize import CHART
from snapshotter.settings import SnapshotterSettings
from tests.fakes.chart import Object, Rendering, containers, faults, pod_of, refusal, render
from weight_cache.settings import WeightCacheSettings

DIGEST = "sha256:" + "5" * 64
EVERYTHING: Mapping[str, Any] = {
    "fullnameOverride": "a-name-that-is-as-long-as-names-may-ever-be",
    "allowTags": True,
    "images": {"controller": "registry.example/c:v1", "activator": f"registry.example/a@{DIGEST}"},
    "imagePullSecrets": ["pull"],
    "config": {
        "cluster": {
            "runtime_image": f"registry.example/r@{DIGEST}",
            "knative_namespace": "kn",
            "restore_into_pods": True,
            "warm_pods": [{"name": "h100", "cpu": 4, "gpu": "H100", "gpu_count": 1}],
        },
        "activator": {"max_body_bytes": 104857600, "traces_sampled": 0.5, "listen": "0.0.0.0:8700"},
        "weight_cache": {"max_bytes": 4000000000000},
        "plans": {"gold": {"concurrent": 5}},
        "prices": {"version": "2027-01", "gpu_s": {"H100": "0.002"}},
        "issuers": {
            "company": {
                "issuer": "https://login.example.com",
                "client_id": "pilotlight",
                "client_secret_file": "/etc/pilotlight/secrets/issuer-company",
                "redirect_url": "https://ml.example.com/dashboard/login/callback",
                "sign_in": [{"claims": {"groups": ["ml"]}, "tenant": "default", "scope": "deploy"}],
                "callers": [{"audience": "a", "claims": {"plan": "pro"}, "tenant": "acme"}],
            }
        },
    },
    "secrets": {"issuers": {"company": "company.secret"}},
    "s3": {"secretName": "s3"},
    "tls": {
        "mode": "secrets",
        "secrets": {"controller": "tls-c", "activator": "tls-a", "node": "tls-n"},
    },
    "controller": {
        "replicas": 2,
        "podAnnotations": {"x": "y"},
        "serviceAccountAnnotations": {"role": "r"},
    },
    "activator": {
        "replicas": 3,
        "shutdownSeconds": 600,
        "maxUnavailable": "34%",
        "priorityClassName": "high",
        "extraEnv": [{"name": "A", "value": "b"}],
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    },
    "node": {
        "priorityClassName": "system-node-critical",
        "runtimeClassName": "nvidia",
        "hostPath": "/mnt/nvme/pilotlight",
        "hostPID": True,
        "registrySecret": "registry",
        "nodeSelector": {"gpu": "true"},
    },
    "redis": {"enabled": False},
    "networkPolicy": {
        "callersFrom": [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}
        ],
        "extraEgress": [{"ports": [{"protocol": "TCP", "port": 4318}]}],
    },
    "monitoring": {
        "podMonitors": True,
        "dashboards": True,
        "rules": True,
        "labels": {"prometheus": "main"},
    },
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "tlsSecretName": "public-tls",
        "annotations": {"a": "b"},
    },
    "gateway": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
}
LITTLE: Mapping[str, Any] = {
    "activator": {"replicas": 1},
    "node": {"enabled": False},
    "redis": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "tls": {"issuer": {"name": "house", "kind": "ClusterIssuer"}},
}
SETS = {
    "default": ({}, "pilotlight", "pilotlight"),
    "everything": (EVERYTHING, "prod", "models"),
    "little": (LITTLE, "pilotlight", "pilotlight"),
}
WITHOUT_NAMESPACE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
GIVEN_SECRETS = frozenset(
    {"pilotlight-secrets", "pull", "registry", "s3", "tls-c", "tls-a", "tls-n", "public-tls"}
)
"""Secrets that the operator makes."""


@pytest.fixture(name="chart", scope="module", params=SETS)
def _chart(request: pytest.FixtureRequest) -> Rendering:
    values, release, namespace = SETS[request.param]
    return render(values, release=release, namespace=namespace)


@pytest.fixture(name="default", scope="module")
def _default() -> Rendering:
    return render({})


@pytest.fixture(name="everything", scope="module")
def _everything() -> Rendering:
    return render(EVERYTHING, release="prod", namespace="models")


# -- valid -----------------------------------------------------------------------------------------
def test_every_object_is_what_the_api_server_takes(chart: Rendering) -> None:
    assert [fault for each in chart.objects for fault in faults(each)] == []
    assert {"Deployment", "StatefulSet", "Service", "ConfigMap", "ClusterRole"} <= {
        each["kind"] for each in chart.objects
    }


def test_a_wrong_field_would_be_found(default: Rendering) -> None:
    spoilt = json.loads(json.dumps(default.one("StatefulSet", "activator")))
    spoilt["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    assert "terminationGracePeriod" in faults(spoilt)[0]


def test_names_are_unique_and_fit(chart: Rendering) -> None:
    names = [
        (
            each["apiVersion"],
            each["kind"],
            each["metadata"].get("namespace"),
            each["metadata"]["name"],
        )
        for each in chart.objects
    ]
    assert len(names) == len(set(names))
    for each in chart.of("Service", "StatefulSet", "Deployment", "DaemonSet"):
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", each["metadata"]["name"])
    for each in chart.of("StatefulSet"):
        # + "-" + a hash of ten characters is a label's value
        assert len(each["metadata"]["name"]) <= 52
    for key, value in (
        (k, v) for each in chart.objects for k, v in each["metadata"]["labels"].items()
    ):
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value), key


def test_every_object_names_its_namespace(chart: Rendering) -> None:
    """Else `kubectl apply` puts it into whichever namespace is the current one."""
    knative = (chart.values.get("config") or {}).get("cluster", {}).get("knative_namespace")
    others = {chart.namespace: None, knative or "knative-serving": {"Role", "RoleBinding"}}
    for each in chart.objects:
        namespace = each["metadata"].get("namespace")
        what = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] in WITHOUT_NAMESPACE:
            assert namespace is None, what
        else:
            assert namespace in others, what
            allowed = others[namespace]
            assert allowed is None or each["kind"] in allowed, what
        for subject in each.get("subjects") or ():
            assert subject["namespace"] == chart.namespace, what


def test_helm_finds_nothing_to_say() -> None:
    done = render_kustomize.helm("lint", "--strict", str(CHART))
    assert "0 chart(s) failed" in done.stdout, done.stdout


def test_what_is_derived_is_up_to_date() -> None:
    for path, text in {
        **render_kustomize.files(),
        render_kustomize.KUSTOMIZE / "pilotlight.yaml": render_kustomize.rendering_text(),
    }.items():
        assert path.read_text() == text, f"{path.name}: run scripts/render-kustomize"
    kustomization = yaml.safe_load((render_kustomize.KUSTOMIZE / "kustomization.yaml").read_text())
    assert [
        name
        for name in kustomization["resources"]
        if not (render_kustomize.KUSTOMIZE / name).exists()
    ] == []
    namespace = yaml.safe_load((render_kustomize.KUSTOMIZE / "namespace.yaml").read_text())
    assert faults(namespace) == []
    assert namespace["metadata"]["name"] == render_kustomize.NAMESPACE


# -- hangs together --------------------------------------------------------------------------------
def _secrets_of(pod: Object) -> Iterator[tuple[str, frozenset[str]]]:
    """Names of secrets that a pod refers to, with the keys."""
    for volume in pod.get("volumes", []):
        if "secret" in volume:
            yield (
                volume["secret"]["secretName"],
                frozenset(item["key"] for item in volume["secret"].get("items", [])),
            )
    for container in pod["containers"]:
        for variable in container.get("env", []):
            if (reference := variable.get("valueFrom", {}).get("secretKeyRef")) is not None:
                yield reference["name"], frozenset({reference["key"]})
        for source in container.get("envFrom", []):
            yield source["secretRef"]["name"], frozenset()
    for pull in pod.get("imagePullSecrets", []):
        yield pull["name"], frozenset()


def test_whatever_pods_refer_to_is_there(chart: Rendering) -> None:
    config_maps = {each["metadata"]["name"] for each in chart.of("ConfigMap")}
    accounts = {each["metadata"]["name"] for each in chart.of("ServiceAccount")}
    made = {each["spec"]["secretName"] for each in chart.of("Certificate")}
    keys = {
        "platform.key",
        "activator.key",
        "node.key",
        "metrics.token",
        "database-url",
        "redis-url",
        "redis-password",
        "company.secret",
    }
    for workload in chart.workloads:
        pod = pod_of(workload)
        assert pod["serviceAccountName"] in accounts
        for name, used in _secrets_of(pod):
            assert name in made | GIVEN_SECRETS
            assert name != "pilotlight-secrets" or (used and used <= keys), (
                "each pod gets the keys that it needs, not the secret"
            )
        assert {
            v["configMap"]["name"] for v in pod.get("volumes", []) if "configMap" in v
        } <= config_maps
        there = {volume["name"] for volume in pod.get("volumes", [])}
        there |= {
            claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])
        }
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= there
    used_accounts = {pod_of(each)["serviceAccountName"] for each in chart.workloads}
    assert used_accounts == accounts, "no account is left over"


def test_probes_ask_ports_that_are_there(chart: Rendering) -> None:
    for _, container in containers(chart):
        ports = {port["name"] for port in container["ports"]}
        assert all(len(name) <= 15 for name in ports)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "httpGet" in container.get(probe, {}):
                assert container[probe]["httpGet"]["port"] in ports
        assert "livenessProbe" in container
        assert "readinessProbe" in container


def test_services_and_budgets_select_pods_with_those_ports(chart: Rendering) -> None:
    for service in chart.of("Service"):
        (workload,) = chart.selected({"matchLabels": service["spec"]["selector"]})
        ports = {
            port["name"]: port["containerPort"]
            for c in pod_of(workload)["containers"]
            for port in c["ports"]
        }
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            assert (
                service["spec"].get("clusterIP") != "None"
                or port["port"] == ports[port["targetPort"]]
            ), "a headless one changes no port"
    for budget in chart.of("PodDisruptionBudget"):
        assert len(chart.selected(budget["spec"]["selector"])) == 1
    services = {each["metadata"]["name"] for each in chart.of("Service")}
    assert {each["spec"]["serviceName"] for each in chart.of("StatefulSet")} <= services
    for workload in chart.workloads:
        assert chart.selected(workload["spec"]["selector"]) == [workload]
    for monitor in chart.of("PodMonitor"):
        (workload,) = chart.selected(monitor["spec"]["selector"])
        named = {port["name"] for c in pod_of(workload)["containers"] for port in c["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= named
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert (
                endpoint["authorization"]["credentials"]["key"]
                in dict(_secrets_of(pod_of(workload)))["pilotlight-secrets"]
            )
    for ingress in chart.of("Ingress"):
        backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
        assert backend["port"]["name"] in [
            port["name"] for port in chart.one("Service", backend["name"])["spec"]["ports"]
        ]


def _allowed(policy: Object, direction: str) -> Iterator[tuple[str | None, Any]]:
    """Pairs of (component of a peer or None for anybody else, port)."""
    for rule in policy["spec"].get(direction, []):
        for peer in rule.get("from" if direction == "ingress" else "to", [{}]):
            labels = (
                peer.get("podSelector", {}).get("matchLabels", {})
                if "namespaceSelector" not in peer
                else {}
            )
            for port in rule["ports"]:
                yield labels.get("app.kubernetes.io/component"), port["port"]


def test_policies_select_pods_that_are_there_by_ports_that_they_have(
    everything: Rendering, default: Rendering
) -> None:
    for chart in (default, everything):
        for policy in chart.of("NetworkPolicy"):
            selected = chart.selected(policy["spec"]["podSelector"])
            assert selected
            ports = {
                port["name"]
                for each in selected
                for c in pod_of(each)["containers"]
                for port in c["ports"]
            }
            assert {
                port for _, port in _allowed(policy, "ingress") if isinstance(port, str)
            } <= ports
            components = {
                component
                for direction in ("ingress", "egress")
                for component, _ in _allowed(policy, direction)
            } - {None}
            assert components <= {
                each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
                for each in chart.workloads
            } | {"journal-drain"}


def test_who_may_be_sent_to_may_be_received_from(default: Rendering) -> None:
    policies = {each["metadata"]["name"]: each for each in default.of("NetworkPolicy")}
    received = {
        (name.removeprefix("pilotlight-"), *pair)
        for name, each in policies.items()
        for pair in _allowed(each, "ingress")
    }
    for name, policy in policies.items():
        for component, port in _allowed(policy, "egress"):
            assert (
                component is None or (component, name.removeprefix("pilotlight-"), port) in received
            )
    everybody = policies["pilotlight"]["spec"]
    assert (everybody["policyTypes"], "ingress" in everybody) == (["Ingress", "Egress"], False)
    assert len(default.selected(everybody["podSelector"])) == len(default.workloads)


def test_a_departed_activators_journal_is_drained_by_a_job_that_is_valid_and_let_in(
    default: Rendering,
) -> None:
    activators = {**default.one("StatefulSet", "activator")}
    activators["metadata"] = {**activators["metadata"], "namespace": "pilotlight"}
    claim = {"metadata": {"name": "journal-pilotlight-activator-4"}}
    job = drain_job(
        activators,
        OrphanedJournal(claim=claim, ordinal=4),
        labels={"app.kubernetes.io/managed-by": "pilotlight"},
    )
    assert faults(dict(job)) == []
    container = pod_of(dict(job))["containers"][0]
    assert [*container["command"], *container["args"]] == [
        "python",
        "-m",
        "activator",
        "--config",
        "/etc/pilotlight/config/platform.yaml",
        "--index",
        "4",
        "--drain-journal",
    ]
    component = job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
    assert (component, "control") in _allowed(
        default.one("NetworkPolicy", "-controller"), "ingress"
    )
    assert (component, "redis") in _allowed(default.one("NetworkPolicy", "-redis"), "ingress")


# -- settings --------------------------------------------------------------------------------------
def _written(chart: Rendering, directory: Path) -> Path:
    """platform.yaml as a pod has it, the mounted secrets beside it."""
    for name, text in (
        ("database-url", "postgresql+psycopg://u:p@h/d"),
        ("redis-url", "redis://:p@r:6379/0"),
        ("node.key", "k"),
        ("issuer-company", "s3cret"),
    ):
        (directory / name).write_text(text)
    file = directory / "platform.yaml"
    file.write_text(chart.platform_yaml.replace("/etc/pilotlight/secrets", str(directory)))
    return file


DASHBOARD: Mapping[str, Any] = {
    "config": {"controller": {"dashboard_url": "https://Dashboard.example:443/"}},
    "ingress": {"enabled": True, "host": "api.example", "tlsSecretName": "public-tls"},
    "gateway": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["api.example"]},
}


def test_a_dashboard_with_an_origin_of_its_own_is_reached_at_its_host(tmp_path: Path) -> None:
    chart = render(DASHBOARD)

    origin = read_dashboard_origin(_written(chart, tmp_path))
    assert origin is not None
    assert origin.url == "https://dashboard.example"
    ingress, route = (
        chart.one("Ingress", "pilotlight")["spec"],
        chart.one("HTTPRoute", "pilotlight")["spec"],
    )
    hosts = ["api.example", "dashboard.example"]
    assert (
        [rule["host"] for rule in ingress["rules"]]
        == ingress["tls"][0]["hosts"]
        == route["hostnames"]
        == hosts
    )
    assert len({json.dumps(rule["http"]) for rule in ingress["rules"]}) == 1, (
        "the activator serves both"
    )
    assert [fault for each in chart.objects for fault in faults(each)] == []


@pytest.mark.parametrize("part", ["ingress", "gateway"])
def test_a_dashboard_at_the_host_of_functions_is_refused(part: str) -> None:
    values = {
        "config": {"controller": {"dashboard_url": "https://api.example:8443"}},
        part: DASHBOARD[part],
    }

    assert "api.example is the host of functions" in refusal(values)


def test_our_processes_read_their_settings(chart: Rendering, tmp_path: Path) -> None:
    file = _written(chart, tmp_path)
    read = {name: load_section(record, name, file) for name, record in SECTIONS.items()}
    load_named_records(Plan, "plans", file, base=BUILT_IN_PLANS)
    controller = ControllerConfig.read(file)
    assert controller.database_url == "postgresql+psycopg://u:p@h/d"
    platform, activator = read["platform"], read["activator"]
    assert isinstance(platform, PlatformSettings)
    assert isinstance(activator, ActivatorSettings)
    assert platform.fleet == "knative"
    assert read["cluster"] == load_section(ClusterSettings, "cluster", file)
    assert load_section(ClusterSettings, "cluster", file).namespace == chart.namespace
    replicas = chart.one("StatefulSet", "-activator")["spec"]["replicas"]
    assert activator.activators == replicas
    assert (activator.redis_url is None) == (replicas == 1)


def test_what_is_given_is_there_as_it_was_given(everything: Rendering, tmp_path: Path) -> None:
    file = _written(everything, tmp_path)
    assert load_section(ActivatorSettings, "activator", file).max_body_bytes == 104857600
    assert load_section(WeightCacheSettings, "weight_cache", file).max_bytes == 4000000000000
    assert load_named_records(Plan, "plans", file, base=BUILT_IN_PLANS)["gold"].concurrent == 5
    assert ControllerConfig.read(file).issuer_secrets == {"company": "s3cret"}
    assert load_section(ClusterSettings, "cluster", file).node_path == "/mnt/nvme/pilotlight/node"
    assert load_section(SnapshotterSettings, "snapshotter", file).restore_into_pods, (
        "the agent does not read section cluster"
    )
    login = load_section(SnapshotterSettings, "snapshotter", file).registry_login
    (agent, weights) = everything.one("DaemonSet", "-node")["spec"]["template"]["spec"][
        "containers"
    ]
    mounted = {one["name"]: one["mountPath"] for one in agent["volumeMounts"]}
    assert login == f"{mounted['registry']}/config.json"
    assert "registry" not in {one["name"] for one in weights["volumeMounts"]}


def test_addresses_are_services_with_certificates_for_their_names(
    default: Rendering, tmp_path: Path
) -> None:
    file = _written(default, tmp_path)
    platform, activator = (
        load_section(PlatformSettings, "platform", file),
        load_section(ActivatorSettings, "activator", file),
    )
    peers = load_section(WeightCacheSettings, "weight_cache", file).peers
    assert isinstance(peers, str)
    _, name, peer_port = peers.split(":")
    controller, siblings = (
        urlsplit(platform.controller_url),
        urlsplit((activator.sibling_url or "").replace("{index}", "1")),
    )
    agents = urlsplit(load_section(SnapshotterSettings, "snapshotter", file).activators or "")
    names = {
        each["metadata"]["name"]: each["spec"].get("dnsNames", [])
        for each in default.of("Certificate")
    }
    for component, host, port in (
        ("controller", controller.hostname, controller.port),
        ("activator", siblings.hostname, siblings.port),
        ("activator", agents.hostname, agents.port),
        ("node", name, int(peer_port)),
    ):
        assert isinstance(host, str)
        service = default.one(
            "Service", host.removesuffix(f".{default.namespace}.svc").rpartition(".")[2]
        )
        assert port in [each["port"] for each in service["spec"]["ports"]]
        patterns = names[f"pilotlight-{component}"]
        assert any(
            fnmatch.fnmatch(host, pattern) and host.count(".") == pattern.count(".")
            for pattern in patterns
        ), (host, patterns)
        assert all(pattern.count(".") >= 2 for pattern in patterns if pattern.startswith("*")), (
            "TLS wants two dots behind a wildcard"
        )
    sts = default.one("StatefulSet", "activator")
    assert (siblings.hostname or "").startswith(
        f"{sts['metadata']['name']}-1.{sts['spec']['serviceName']}."
    )


def test_listeners_are_the_ports_that_are_named(default: Rendering, tmp_path: Path) -> None:
    settings = yaml.safe_load(default.platform_yaml)
    ports = {
        port["name"]: str(port["containerPort"])
        for _, c in containers(default)
        for port in c["ports"]
        if port["name"] != "metrics"
    }
    listens = {
        "control": settings["controller"]["listen"],
        "http": settings["activator"]["listen"],
        "siblings": settings["activator"]["sibling_listen"],
        "agents": settings["activator"]["agents_listen"],
        "metrics-snap": settings["snapshotter"]["metrics_listen"],
        "metrics-weights": settings["weight_cache"]["metrics_listen"],
        "peers": settings["weight_cache"]["peer_listen"],
        "redis": "0.0.0.0:6379",
    }
    assert {name: listen.rpartition(":")[2] for name, listen in listens.items()} == ports


def test_a_pod_ends_after_its_calls(chart: Rendering, tmp_path: Path) -> None:
    settings = load_section(ActivatorSettings, "activator", _written(chart, tmp_path))
    grace_s = pod_of(chart.one("StatefulSet", "-activator"))["terminationGracePeriodSeconds"]
    assert grace_s >= settings.drain_s + settings.shutdown_s + 10


def test_changed_settings_roll_the_pods(default: Rendering) -> None:
    changed = render({"config": {"activator": {"max_queued": 5}}})
    for name in ("controller", "activator", "node"):
        before, after = (
            next(
                each for each in chart.workloads if each["metadata"]["name"] == f"pilotlight-{name}"
            )
            for chart in (default, changed)
        )
        key = "checksum/config"
        assert (
            before["spec"]["template"]["metadata"]["annotations"][key]
            != after["spec"]["template"]["metadata"]["annotations"][key]
        )


# -- safety ----------------------------------------------------------------------------------------
def test_no_secret_is_in_a_config_map_and_no_secret_is_made(chart: Rendering) -> None:
    assert chart.of("Secret") == []
    for each in chart.of("ConfigMap"):
        for name, text in each["data"].items():
            assert not re.search(
                r"password|PRIVATE KEY|redis://|postgresql", text, re.IGNORECASE
            ) or name.startswith("pilotlight-"), name


def test_images_are_named_by_digest(default: Rendering) -> None:
    for _, container in containers(default):
        assert re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", container["image"])
    assert "latest" not in json.dumps(default.objects)


def test_only_the_node_agent_has_rights_on_its_machine(chart: Rendering) -> None:
    for workload, container in containers(chart):
        pod, security = pod_of(workload), container["securityContext"]
        is_node = workload["kind"] == "DaemonSet"
        assert security["readOnlyRootFilesystem"]
        assert "resources" in container
        assert is_node or not any("hostPath" in volume for volume in pod.get("volumes", []))
        assert is_node or not any(pod.get(key) for key in ("hostPID", "hostNetwork", "hostIPC"))
        if container["name"] != "snapshotter":
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security.get("privileged")
        if not is_node:
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"


def test_only_an_agent_that_restores_into_pods_sees_the_nodes_cgroups(
    everything: Rendering, default: Rendering
) -> None:
    for chart, paths in (
        (default, {"/var/lib/pilotlight"}),
        (everything, {"/mnt/nvme/pilotlight", "/sys/fs/cgroup"}),
    ):
        volumes = pod_of(chart.one("DaemonSet", "-node"))["volumes"]
        assert {volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume} == paths


def test_who_has_no_rights_has_no_token(chart: Rendering) -> None:
    bound = {
        subject["name"]
        for each in chart.of("RoleBinding", "ClusterRoleBinding")
        for subject in each["subjects"]
    }
    for workload in chart.workloads:
        assert (pod_of(workload)["serviceAccountName"] in bound) == pod_of(workload).get(
            "automountServiceAccountToken", True
        )
    for account in chart.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] == (account["metadata"]["name"] in bound)


def test_a_node_has_no_key_that_opens_anything(default: Rendering) -> None:
    used = {
        each["metadata"]["name"]: dict(_secrets_of(pod_of(each)))["pilotlight-secrets"]
        for each in default.workloads
    }
    assert used == {
        "pilotlight-controller": {
            "platform.key",
            "activator.key",
            "node.key",
            "metrics.token",
            "database-url",
        },
        "pilotlight-activator": {"activator.key", "metrics.token", "redis-url"},
        "pilotlight-redis": {"redis-password"},
        "pilotlight-node": {"node.key", "metrics.token"},
    }


def test_the_secrets_of_clients_at_issuers_are_the_controllers(everything: Rendering) -> None:
    having = [
        each["metadata"]["name"]
        for each in everything.workloads
        if "company.secret" in dict(_secrets_of(pod_of(each)))["pilotlight-secrets"]
    ]
    assert [name.rpartition("-")[2] for name in having] == ["controller"]


def test_journals_outlive_their_activators(chart: Rendering) -> None:
    policy = chart.one("StatefulSet", "-activator")["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert policy == {"whenDeleted": "Retain", "whenScaled": "Retain"}


# -- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "values, named",
    [
        ({"images.controller": "registry.example/c:v1"}, "images.controller|/images/controller"),
        ({"activator.replicas": 0}, "activator.replicas|/activator/replicas"),
        ({"activator.replcas": 3}, "replcas"),
        ({"config.activator.max_bdy_bytes": 3}, "max_bdy_bytes"),
        ({"config.activator.redis_url": "redis://:p@h"}, "redis_url"),
        (
            {"config.cluster.max_timeout_s": "600"},
            "config.cluster.max_timeout_s|/config/cluster/max_timeout_s",
        ),
        ({"config.plans.gold.concurent": 3}, "concurent"),
        ({"config.cluster.warm_pods": [{"nam": "a"}]}, "nam"),
        (
            {"config.cluster.field_manager": "A b"},
            r"config\.cluster\.field_manager: .* admissionPolicies\.enabled: false",
        ),
        (
            {"admissionPolicies.enabled": "no"},
            "admissionPolicies.enabled|/admissionPolicies/enabled",
        ),
        ({"tls.mode": "none"}, "tls.mode|/tls/mode"),
        ({"node.hostPath": "relative"}, "node.hostPath|/node/hostPath"),
        (
            {"config.cluster.restore_into_pods": True, "node.hostPID": False},
            r"set node\.privileged and node\.hostPID",
        ),
        (
            {"config.cluster.warm_pods": [{"name": "a"}], "node.privileged": False},
            r"config\.cluster\.warm_pods: .* set node\.enabled",
        ),
        ({"node.registrySecret": "registry"}, r"node\.registrySecret: .*restore_into_pods only"),
        ({"tls.mode": "secrets"}, r"tls\.secrets\.\w+: name the secret"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(values: dict[str, Any], named: str) -> None:
    assert re.search(named, refusal(values))


def _keys(properties: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for name, each in properties.items():
        yield f"{at}{name}"
        yield from _keys(each.get("properties", {}), f"{at}{name}.")


def test_every_value_is_in_the_file_with_a_word_about_it() -> None:
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    for key in _keys(schema()["properties"]):
        section = key.split(".")
        if section[0] in ("global", "config") or key.startswith(("tls.issuer.", "images.")):
            continue
        found: Any = values
        for part in section:
            assert part in found, f"{key} is not in values.yaml"
            found = found[part]
    top = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    lines = text.splitlines()
    for line in top:
        assert (
            "#" in line
            or lines[lines.index(line) - 1].startswith("#")
            or line.rstrip(":") in ("controller", "activator", "gateway")
        ), line


NOTES_AS_AN_OBJECT = """apiVersion: v1
kind: ConfigMap
metadata: {name: notes}
data:
  text: |
    {{- tpl (.Files.Get "NOTES.txt") . | nindent 4 }}
"""
"""Helm shows notes only after it has spoken to a cluster."""


@pytest.mark.parametrize("which", SETS)
def test_the_notes_say_what_comes_next_in_the_words_of_this_installation(
    which: str, tmp_path: Path
) -> None:
    values, release, namespace = SETS[which]
    chart = shutil.copytree(CHART, tmp_path / "chart")
    (chart / "templates/NOTES.txt").rename(chart / "NOTES.txt")
    (chart / "templates/notes.yaml").write_text(NOTES_AS_AN_OBJECT)
    text = str(
        render(values, release=release, namespace=namespace, chart=chart).one("ConfigMap", "notes")[
            "data"
        ]["text"]
    )

    name = values.get("fullnameOverride", release)[:40]
    assert f"exec deploy/{name}-controller" in text
    assert "--first-key" in text
    assert f"kubectl -n {namespace} create secret generic pilotlight-secrets" in text
    assert ("! images.node is a placeholder" in text) == (
        "images" not in values or "node" not in values["images"]
    )
    assert ("https://pilotlight.example" in text) == ("ingress" in values)
    for key in (
        "platform.key",
        "activator.key",
        "node.key",
        "metrics.token",
        "database-url",
        "redis-url",
        "redis-password",
    ):
        assert f"--from-literal={key}=" in text
    assert "<no value>" not in text


def test_directories_that_processes_make_their_own_lie_inside_of_volumes(chart: Rendering) -> None:
    """They are made 0700 by their owner; a volume's own root is root's, and who is not root may not
    change its mode (chmod(2), EPERM)."""
    platform = yaml.safe_load(chart.platform_yaml)["platform"]
    for workload, container in containers(chart):
        if workload["metadata"]["name"].endswith("-redis"):
            continue
        mounts = [
            mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
        ]
        for directory in (platform["home"], platform["run"]):
            assert directory not in mounts
            assert any(directory.startswith(f"{mount}/") for mount in mounts), (
                container["name"],
                directory,
            )
        sockets = len(platform["run"]) + len("/slots/s-0123456789abcdef/i-0123456789abcdef.sock")
        assert sockets <= 107, "a Unix socket's path (unix(7))"
