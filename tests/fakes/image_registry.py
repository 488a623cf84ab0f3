"""Debian's `docker-registry` on loopback, with one login."""

from __future__ import annotations

import contextlib
import json
import platform
import ssl
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from pilotlight.core.transport.endpoint import TlsFiles
from pilotlight.packaging.oci.contents import LayerContents
from pilotlight.packaging.oci.layers import write_layer
from pilotlight.packaging.oci.layout import create_layout, write_image
from tests.fakes.plain_http import NO_TLS
from tests.fakes.ports import free_port

USER, PASSWORD = "ada", "s3cr3t:with:colons"
_HTPASSWD = "ada:$2y$04$Lv1en0koNmjAecpk662/HOJhgasInkJ3dUsEGNvh5ePwfcLGolMBe\n"
"""Of htpasswd(1): bcrypt, which is all that the registry reads."""
_CONFIG = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "{host}"{tls}}}
auth: {auth}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRegistry:
    """A running registry: its address `host:port`, a directory whose `config.json` logs in, and the
    file with its log."""

    host: str
    login: Path
    log: Path

    def environ(self) -> dict[str, str]:
        """Variables of a user who is logged in."""
        return {"DOCKER_CONFIG": str(self.login), "HOME": str(self.login)}

    def uploads(self, repository: str) -> int:
        """Blobs that were sent to a repository until now."""
        return self.log.read_text().count(f'"PUT /v2/{repository}/blobs/uploads/')

    def manifest(self, reference: str) -> dict[str, object]:
        """The manifest of `host/name@sha256:…`, as a node would read it."""
        name, _, digest = reference.removeprefix(f"{self.host}/").partition("@")
        response = httpx.get(
            f"http://{self.host}/v2/{name}/manifests/{digest}",
            auth=(USER, PASSWORD),
            headers={"accept": "application/vnd.oci.image.manifest.v1+json"},
        )
        response.raise_for_status()
        return dict(response.json())


@contextlib.contextmanager
def image_registry(
    directory: Path, *, auth: str | None = None, tls: TlsFiles | None = None
) -> Iterator[ImageRegistry]:
    """A registry whose files are in `directory`; `auth`: that section of its configuration, "{}" for no login. Needs
    the Debian package docker-registry."""
    host, login, log = f"127.0.0.1:{free_port()}", directory / "login", directory / "registry.log"
    login.mkdir()
    pair = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (login / "config.json").write_text(json.dumps({"auths": {host: {"auth": pair}}}))
    (directory / "htpasswd").write_text(_HTPASSWD)
    auth = auth or f"{{htpasswd: {{realm: test, path: {directory / 'htpasswd'}}}}}"
    config = directory / "registry.yml"
    secured = f", tls: {{certificate: {tls.cert}, key: {tls.key}}}" if tls is not None else ""
    config.write_text(_CONFIG.format(root=directory / "store", host=host, auth=auth, tls=secured))
    with log.open("wb") as file:
        server = subprocess.Popen(
            ["docker-registry", "serve", config], stdout=file, stderr=file, env={}
        )
    try:
        _wait(host, server, log, tls)
        yield ImageRegistry(host=host, login=login, log=log)
    finally:
        server.kill()
        server.wait()


def make_layout(folder: Path, *texts: str | bytes, name: str = "file") -> str:
    """An OCI layout with a layer for each text, in a file of that name; the image's digest."""
    blobs = create_layout(folder)
    layers = []
    for number, text in enumerate(texts):
        contents = LayerContents()
        contents.text(name, text)
        layers.append(write_layer(contents, blobs, title=f"layer {number}", epoch_s=0))
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    rootfs = {"type": "layers", "diff_ids": [one.diff_id for one in layers]}
    config = {"architecture": architecture, "os": "linux", "rootfs": rootfs}
    return write_image(folder, layers, config=config, tag="latest")


def _wait(host: str, server: subprocess.Popen[bytes], log: Path, tls: TlsFiles | None) -> None:
    verify = ssl.create_default_context(cafile=tls.ca) if tls is not None else NO_TLS
    url = f"{'http' if tls is None else 'https'}://{host}/v2/"
    until = time.monotonic() + 30
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, verify=verify).status_code in (200, 401):
                return
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < until
        time.sleep(0.02)
