"""nginx as the object store that weights come from: path-style S3 for reading (`/bucket/<key>` with
Range, ETag, If-Match, HEAD).

Its one worker process sends files from the page cache; it ignores signatures, and writes down what
it sent, so that a benchmark can say how often each byte was read. It may run with a niceness,
because it stands for another machine and must not win the CPU from here."""

from __future__ import annotations

import contextlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.network import free_port
from benchmarks.nginx import started
from pilotlight.core.object_store import blob_key
from weight_cache.manifest import Manifest
from weight_cache.sources.manifest_builder import build_manifest

BUCKET = "bench"
CONFIGURATION = """\
daemon off;
worker_processes 1;
pid {home}/pid;
error_log {home}/error.log warn;
events {{ worker_connections 1024; }}
http {{
  log_format sent '$request_method $status $body_bytes_sent $uri';
  access_log {home}/sent.log sent;
  client_body_temp_path {home}/body;
  proxy_temp_path {home}/proxy;
  fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi;
  scgi_temp_path {home}/scgi;
  keepalive_requests 100000000;
  sendfile on;
  sendfile_max_chunk 2m;
  tcp_nopush on;
  default_type application/octet-stream;
  server {{
    listen 127.0.0.1:{port};
    location / {{ root {root}; }}
  }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A running origin: `url` is the S3 endpoint, `log` holds one line per answered request."""

    url: str
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        """What an S3 client needs to read here."""
        return environment(self.url)

    def sent_bytes(self, *keys: str) -> int:
        """Bytes of bodies answered until now, of these objects or of all."""
        # The only worker writes a line before it turns to the next request: whatever was answered
        # before this one is in the file.
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{self.url}/{BUCKET}/barrier", timeout=10).close()
        return sum_sent(self.log.read_text(), {f"/{BUCKET}/{key}" for key in keys})


def environment(url: str) -> dict[str, str]:
    """What an S3 client needs to find an endpoint; the keys are made up, nobody checks them."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def sum_sent(log: str, paths: Collection[str] = ()) -> int:
    """Bytes of the successful GETs in a log of `METHOD status bytes path` lines, of these paths or
    (none given) of all."""
    lines = (line.split(" ", 3) for line in log.splitlines())
    return sum(
        int(sent)
        for method, status, sent, path in lines
        if (method, status[:2]) == ("GET", "20") and (not paths or path in paths)
    )


@contextlib.contextmanager
def serving(blobs: Path, *, niceness: int = 0) -> Iterator[Origin]:
    """Serve the directory `blobs` as bucket `BUCKET`. Raises DidNotStart."""
    with tempfile.TemporaryDirectory(prefix="plor") as name:
        home, port = Path(name), free_port()
        root = home / "root"
        root.mkdir()
        (root / BUCKET).symlink_to(blobs.resolve())
        with started(
            home,
            CONFIGURATION.format(home=home, port=port, root=root),
            port=port,
            niceness=niceness,
        ):
            yield Origin(url=f"http://127.0.0.1:{port}", log=home / "sent.log")


def publish(model: Path, blobs: Path) -> Manifest:
    """Put a directory's files and their manifest where an origin serves them; files are linked, not
    copied."""
    manifest = build_manifest(model)
    for file in manifest.files:
        target = blobs / blob_key(file.digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.symlink((model / file.path).resolve(), target)
    note = blobs / blob_key(manifest.digest)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_bytes(manifest.to_bytes())
    return manifest
