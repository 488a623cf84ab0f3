"""The chart's service accounts, rights and admission policies on an API server, the tests' own or a
real one, and tokens of the accounts: what controller and activators have of a cluster, and no
more."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.fakes import account_token
from tests.fakes.chart import RIGHTS, Rendering, render

Json = dict[str, Any]
COMPONENTS = ("controller", "activator")
TOKEN_S = 86_400
EFFECT_S = 30.0
"""How long an API server may take until it enforces a policy that it was given."""
_PLURALS = {"ValidatingAdmissionPolicy": "validatingadmissionpolicies"}
_LEFT_OUT = ("kubeconfig", "context", "namespace")
"""Settings that the chart does not take: it decides them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledChart:
    """A release's rights in a cluster.

    Attributes:
        tokens: by component, and of an administrator as `account_token.OTHERS`.
    """

    rendering: Rendering
    tokens: Mapping[str, str]

    def kubeconfig(self, text: str, directory: Path) -> str:
        """This kubeconfig for all processes of a platform, each of which is its own account
        there. `directory` is made, for the tokens."""
        directory.mkdir(mode=0o755)
        for name, token in self.tokens.items():
            (directory / name).write_text(token)
        plugin = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "interactiveMode": "Never",
            "command": sys.executable,
            "args": ["-I", account_token.__file__, str(directory)],
        }
        return _with_user(text, {"exec": plugin})

    def kubeconfig_of(self, component: str, text: str) -> str:
        """This kubeconfig for one component."""
        return _with_user(text, {"token": self.tokens[component]})


def _with_user(kubeconfig: str, credential: Json) -> str:
    document: Json = yaml.safe_load(kubeconfig)
    for user in document["users"]:
        user["user"] = credential
    return yaml.safe_dump(document)


@contextlib.contextmanager
def installed_chart(
    api: httpx.Client,
    anonymous: httpx.Client,
    namespace: str,
    cluster: Mapping[str, Any],
    *,
    admin_token: str | None,
) -> Iterator[InstalledChart]:
    """Install it into a namespace that is there; remove what is of the whole cluster at the end.

    Args:
        api: of an administrator.
        anonymous: of the same server, without credentials.
        cluster: section `cluster` of platform.yaml.
        admin_token: the administrator's, None where it has another credential.
    """
    values = {
        f"config.cluster.{name}": value
        for name, value in cluster.items()
        if name not in _LEFT_OUT and value is not None
    }
    rendering = render(values, namespace=namespace)
    made: list[str] = []
    try:
        for each in rendering.of("ServiceAccount", *RIGHTS):
            made += _create(api, each, namespace)
        tokens = {name: token_of(api, namespace, f"pilotlight-{name}") for name in COMPONENTS}
        if admin_token is None:
            made += _add_administrator(api, namespace)
            admin_token = token_of(api, namespace, "tests")
        _wait_for_policies(anonymous, tokens["controller"])
        yield InstalledChart(
            rendering=rendering, tokens={**tokens, account_token.OTHERS: admin_token}
        )
    finally:
        for path in reversed(made):
            api.delete(path)


def token_of(api: httpx.Client, namespace: str, account: str) -> str:
    """A new token of a service account (TokenRequest)."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": TOKEN_S},
    }
    return str(api.post(path, json=body).raise_for_status().json()["status"]["token"])


def _create(api: httpx.Client, body: Json, namespace: str) -> list[str]:
    """Create an object; the path of one that does not go with the namespace."""
    where = body["apiVersion"]
    plural = _PLURALS.get(body["kind"], f"{body['kind'].lower()}s")
    is_namespaced = body["kind"] in ("ServiceAccount", "Role", "RoleBinding")
    path = f"/api/{where}" if "/" not in where else f"/apis/{where}"
    path += f"/namespaces/{namespace}/{plural}" if is_namespaced else f"/{plural}"
    answer = api.post(path, json=body)
    assert answer.status_code == 201, f"{path}: {answer.text}"
    return [] if is_namespaced else [f"{path}/{body['metadata']['name']}"]


def _add_administrator(api: httpx.Client, namespace: str) -> list[str]:
    """An account for the command line, which has all rights."""
    group = "rbac.authorization.k8s.io"
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "tests"}}
    _create(api, account, namespace)
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"{namespace}:tests"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "tests", "namespace": namespace}],
    }
    return _create(api, binding, namespace)


def _wait_for_policies(api: httpx.Client, controller: str) -> None:
    """Until the API server enforces them: until it refuses the controller a namespace without the
    platform's label."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "pl-of-nobody"}}
    until = time.monotonic() + EFFECT_S
    while True:
        answer = api.post(
            "/api/v1/namespaces",
            params={"dryRun": "All"},
            headers={"authorization": f"Bearer {controller}"},
            json=body,
        )
        if answer.status_code == 422:
            return
        if time.monotonic() > until:
            raise AssertionError(f"the policies have no effect: {answer.status_code} {answer.text}")
        time.sleep(0.1)
