"""API servers over TLS, as all real ones are: the cluster's own authority, a token or a client's
certificate."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from pilotlight.kubernetes.cluster import CallDeadlines, Cluster
from pilotlight.kubernetes.credentials import find_credentials
from pilotlight.kubernetes.errors import ClusterUnreachable
from pilotlight.kubernetes.kinds import POD
from pilotlight.kubernetes.retry_policy import RetryDelays
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.authority import Authority

ONCE = CallDeadlines(call_s=5, pauses=RetryDelays(attempts=1))


@asynccontextmanager
async def tls_server(
    authority: Authority, directory: Path, *, wants_certificate: bool
) -> AsyncIterator[int]:
    """`/version`, an empty watch of pods, and a command; the port."""
    files = authority.issue(directory / "server", "127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    if wants_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(files.ca)

    async def version(request: web.Request) -> web.Response:
        return web.json_response(
            {"gitVersion": "v1.34.1", "token": request.headers.get("authorization")}
        )

    async def pods(request: web.Request) -> web.Response:
        return web.json_response(
            {"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}
        )

    async def command(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        await socket.send_bytes(b'\x03{"status":"Success"}')
        await socket.close()
        return socket

    application = web.Application()
    application.router.add_get("/version", version)
    application.router.add_get("/api/v1/pods", pods)
    application.router.add_get("/api/v1/namespaces/n/pods/p/exec", command)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_a_pods_service_account_over_tls(tmp_path: Path) -> None:
    authority = Authority()
    account = tmp_path / "account"
    authority.issue(account, "unused")  # writes ca.crt
    (account / "token").write_text("secret")
    async with tls_server(authority, tmp_path, wants_certificate=False) as port:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
        credentials = await find_credentials(
            ClusterSettings(), environ=environ, service_account=account
        )
        async with await Cluster.connect(
            ClusterSettings(), credentials=credentials, patience=ONCE
        ) as cluster:
            assert (await cluster.version())["token"] == "Bearer secret"
            async with aclosing(cluster.watch(POD)) as changes:
                assert (await anext(changes)).type == "SYNCED"
            assert [part async for part in cluster.exec("p", "n", ["true"], container="user")] == [
                {"exit_status": 0}
            ]


def kubeconfig(path: Path, port: int, *, trusts: Path, cert: Path, key: Path) -> ClusterSettings:
    document = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {
                "name": "c",
                "cluster": {
                    "server": f"https://127.0.0.1:{port}",
                    "certificate-authority": str(trusts),
                },
            }
        ],
        "users": [{"name": "u", "user": {"client-certificate": str(cert), "client-key": str(key)}}],
    }
    path.write_text(yaml.safe_dump(document))
    return ClusterSettings(kubeconfig=str(path))


async def test_a_kubeconfig_with_a_clients_certificate(tmp_path: Path) -> None:
    authority = Authority()
    ours = authority.issue(tmp_path / "ours", "admin")
    async with tls_server(authority, tmp_path, wants_certificate=True) as port:
        settings = kubeconfig(
            tmp_path / "kubeconfig", port, trusts=ours.ca, cert=ours.cert, key=ours.key
        )
        async with await Cluster.connect(settings, patience=ONCE) as cluster:
            assert (await cluster.version())["gitVersion"] == "v1.34.1"


async def test_a_server_of_another_authority_is_not_spoken_to(tmp_path: Path) -> None:
    stranger = Authority("stranger").issue(tmp_path / "stranger", "admin")
    async with tls_server(Authority(), tmp_path, wants_certificate=False) as port:
        settings = kubeconfig(
            tmp_path / "kubeconfig", port, trusts=stranger.ca, cert=stranger.cert, key=stranger.key
        )
        async with await Cluster.connect(settings, patience=ONCE) as cluster:
            with pytest.raises(ClusterUnreachable, match="certificate"):
                await cluster.version()
