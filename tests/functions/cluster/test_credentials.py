"""Who we are to the API server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.credentials import TokenFile, find_credentials
from pilotlight.kubernetes.errors import BadCredentials
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.clock import ManualClock


def kubeconfig(path: Path, *, server: str = "http://127.0.0.1:1", **user: Any) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "one",
        "contexts": [
            {"name": name, "context": {"cluster": name, "user": "me"}} for name in ("one", "two")
        ],
        "clusters": [
            {"name": "one", "cluster": {"server": server}},
            {"name": "two", "cluster": {"server": "http://two"}},
        ],
        "users": [{"name": "me", "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


async def token_of(credentials: Any) -> str:
    found = await credentials.configuration.auth_settings()
    return str(found["BearerToken"]["value"])


async def test_a_named_kubeconfig_comes_first(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", token="secret")
    found = await find_credentials(
        ClusterSettings(kubeconfig=str(path)), environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    )
    assert found.configuration.host == "http://127.0.0.1:1"
    assert await token_of(found) == "Bearer secret"
    assert "secret" not in repr(found)


async def test_a_context_is_chosen_by_name(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", token="secret")
    found = await find_credentials(ClusterSettings(kubeconfig=str(path), context="two"))
    assert found.configuration.host == "http://two"
    with pytest.raises(BadCredentials, match="three"):
        await find_credentials(ClusterSettings(kubeconfig=str(path), context="three"))


async def test_a_pod_uses_its_service_account_and_follows_its_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "ca.crt").write_text("")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    found = await find_credentials(ClusterSettings(), environ=environ, service_account=tmp_path)
    assert found.configuration.host == "https://[fd00::1]:6443"
    assert found.configuration.ssl_ca_cert == str(tmp_path / "ca.crt")
    assert await token_of(found) == "Bearer first"
    (tmp_path / "token").write_text("second")
    await found.renew()  # what a 401 does
    assert await token_of(found) == "Bearer second"


async def test_kubeconfigs_of_the_environment_are_merged(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", token="secret")
    environ = {"KUBECONFIG": os.pathsep.join([str(tmp_path / "absent"), str(path)])}
    found = await find_credentials(ClusterSettings(), environ=environ, service_account=tmp_path)
    assert await token_of(found) == "Bearer secret"


async def test_home_is_the_last_place(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube" / "config", token="secret")
    found = await find_credentials(
        ClusterSettings(), environ={"HOME": str(tmp_path)}, service_account=tmp_path
    )
    assert await token_of(found) == "Bearer secret"


async def test_no_credentials_say_where_they_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(BadCredentials, match=r"set cluster\.kubeconfig"):
        await find_credentials(
            ClusterSettings(), environ={"HOME": str(tmp_path)}, service_account=tmp_path
        )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{a", "apiVersion: v1", "current-context: x\ncontexts: []\nclusters: []\nusers: []"],
)
async def test_a_broken_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(BadCredentials, match="config"):
        await find_credentials(ClusterSettings(kubeconfig=str(tmp_path / "config")))


async def test_a_token_file_beside_the_kubeconfig_is_followed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first")
    found = await find_credentials(
        ClusterSettings(kubeconfig=str(kubeconfig(tmp_path / "config", tokenFile="token")))
    )
    assert await token_of(found) == "Bearer first"
    (tmp_path / "token").write_text("second")
    await found.renew()
    assert await token_of(found) == "Bearer second"


async def test_a_plugin_is_asked_again_after_a_401(tmp_path: Path) -> None:
    answer = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "one", "expirationTimestamp": "2999-01-01T00:00:00Z"},
    }
    (tmp_path / "answer").write_text(json.dumps(answer))
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "/bin/cat",
        "args": [str(tmp_path / "answer")],
    }
    found = await find_credentials(
        ClusterSettings(kubeconfig=str(kubeconfig(tmp_path / "config", exec=plugin)))
    )
    assert await token_of(found) == "Bearer one"
    answer["status"] = {"token": "two", "expirationTimestamp": "2999-01-01T00:00:00Z"}
    (tmp_path / "answer").write_text(json.dumps(answer))
    assert await token_of(found) == "Bearer one"  # it has not ended
    await found.renew()
    assert await token_of(found) == "Bearer two"


def test_a_token_is_read_again_after_a_while_and_kept_while_it_is_replaced(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "token"
    path.write_text("first")
    token = TokenFile(path, clock=clock)
    path.write_text("second")
    assert token.token == "first"
    clock.advance(31)
    assert token.token == "second"
    path.unlink()
    clock.advance(31)
    assert token.token == "second"


def test_a_token_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadCredentials, match="service account"):
        TokenFile(tmp_path / "token")
    (tmp_path / "token").write_text(" ")
    with pytest.raises(BadCredentials, match="empty"):
        TokenFile(tmp_path / "token")


async def test_connecting_sends_nothing(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", token="secret")
    async with await Cluster.connect(ClusterSettings(kubeconfig=str(path))) as cluster:
        assert repr(cluster) == "<Cluster http://127.0.0.1:1>"
