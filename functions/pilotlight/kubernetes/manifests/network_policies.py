"""Network policies of a tenant's pods, for ingress and egress. Network policies are additive: each
allows some connections, and all others are refused.

- `pilotlight-in`: denies everything, except that activators reach workers (8080) and queue-proxies
  (8012), and Knative's activator and autoscaler reach queue-proxies and their metrics (9090). The
  kubelet's probes come from the node, which a policy cannot select; network plugins always allow
  the pod's own node.
- `pilotlight-out`: pods with the label value `open` reach DNS and the public internet, but not
  other pods or nodes, whose addresses are private, nor the cloud's metadata address, which is
  link-local. Pods with `none` reach nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Final

from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.manifests.labels import Manifest, object_manifest
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import POD_CONTROL_PORT

OPEN, NONE = "open", "none"
WORKER_PORT: Final = 8080
LAST_WORKER_PORT: Final = 8095
"""Further instances of a promoted pod's revision serve on the ports after WORKER_PORT."""
QUEUE_PROXY_PORT: Final = 8012
METRICS_PORT: Final = 9090
_DNS_PORT = 53
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
_COMPONENT = "app.kubernetes.io/component"
_NODE_DNS = "169.254.20.10/32"
"""Address of NodeLocal DNSCache (kubernetes.io/docs/tasks/administer-cluster/nodelocaldns)."""
_NOT_PUBLIC_4 = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "168.63.129.16/32",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/3",
)
"""Special-purpose addresses (RFC 6890, RFC 4193, RFC 6598), including metadata services
(169.254.169.254, 192.0.0.192, fd00:ec2::254), and 240.0.0.0/4, which some clusters use for pods.
168.63.129.16 looks public, but is Azure's platform address, which provisions its machines
(learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16)."""
_PUBLIC_6 = "2000::/3"
"""Global unicast (RFC 4291). It excludes loopback, ULA (RFC 4193), link-local and multicast
addresses, a metadata service (fd00:ec2::254), mapped, compatible and translated IPv4 addresses, and
local translators (64:ff9b:1::/48, RFC 8215)."""
_NOT_PUBLIC_6 = ("2001::/32", "2002::/16")
"""Tunnels, whose addresses contain an IPv4 address: Teredo (RFC 4380) and 6to4 (RFC 7526:
deprecated)."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""The prefix by which IPv6-only clusters reach IPv4 addresses (RFC 6052): the address is in the
last 32 bits."""


def network_policies(
    namespace: str, *, labels: Mapping[str, str], settings: ClusterSettings
) -> list[Manifest]:
    """The two policies of a tenant's namespace."""
    knative = {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: settings.knative_namespace}}}
    ingress = [
        {"from": [_activators(settings)], "ports": _tcp(QUEUE_PROXY_PORT, WORKER_PORT)},
        {"from": [knative], "ports": _tcp(QUEUE_PROXY_PORT, METRICS_PORT)},
    ]
    selector = {"matchLabels": {names.NETWORK: OPEN}}
    return _policies(namespace, labels, ingress, selector, settings)


def warm_policies(
    namespace: str, *, labels: Mapping[str, str], settings: ClusterSettings
) -> list[Manifest]:
    """The two policies of the namespace of warm pods. Egress is allowed by labels that only a
    promotion sets: before, and until a network plugin has noticed them, a pod may less than
    afterwards, never more."""
    ports = _tcp(*range(POD_CONTROL_PORT, LAST_WORKER_PORT + 1))
    selector = {
        "matchLabels": {names.NETWORK: OPEN},
        "matchExpressions": [{"key": names.TENANT, "operator": "Exists"}],
    }
    ingress = [{"from": [_activators(settings)], "ports": ports}]
    return _policies(namespace, labels, ingress, selector, settings)


def _policies(
    namespace: str,
    labels: Mapping[str, str],
    ingress: list[dict[str, Any]],
    open_selector: dict[str, Any],
    settings: ClusterSettings,
) -> list[Manifest]:
    def policy(name: str, spec: Mapping[str, Any]) -> Manifest:
        return object_manifest(
            kinds.NETWORK_POLICY, name, namespace=namespace, labels=labels, spec=dict(spec)
        )

    denied = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": ingress}
    opened = {
        "podSelector": open_selector,
        "policyTypes": ["Egress"],
        "egress": _egress(settings),
    }
    return [policy("pilotlight-in", denied), policy("pilotlight-out", opened)]


def _activators(settings: ClusterSettings) -> dict[str, Any]:
    return {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: settings.namespace}},
        "podSelector": {"matchLabels": {_COMPONENT: "activator"}},
    }


def _egress(settings: ClusterSettings) -> list[dict[str, Any]]:
    dns = {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    outside = [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_NOT_PUBLIC_4)}},
        {"ipBlock": {"cidr": _PUBLIC_6, "except": list(_NOT_PUBLIC_6)}},
        {"ipBlock": {"cidr": str(_NAT64), "except": [_translated(cidr) for cidr in _NOT_PUBLIC_4]}},
        *({"ipBlock": {"cidr": cidr}} for cidr in settings.egress_cidrs),
    ]
    both = [{"port": _DNS_PORT, "protocol": "UDP"}, {"port": _DNS_PORT, "protocol": "TCP"}]
    return [{"to": [dns, {"ipBlock": {"cidr": _NODE_DNS}}], "ports": both}, {"to": outside}]


def _translated(cidr: str) -> str:
    """The NAT64 addresses of an IPv4 network."""
    four = ipaddress.IPv4Network(cidr)
    address = ipaddress.IPv6Address(int(_NAT64.network_address) + int(four.network_address))
    return f"{address}/{_NAT64.prefixlen + four.prefixlen}"


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
