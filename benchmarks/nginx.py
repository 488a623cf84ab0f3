"""nginx as the yardstick: one worker process, `proxy_pass` over kept-alive connections to the same
Unix socket.

And nginx as an object store for reading (`benchmarks/origin.py`).
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import priority
from benchmarks.load import CONNECTIONS
from benchmarks.network import free_port, wait_connectable
from benchmarks.programs import program

CONFIGURATION = """\
daemon off;
worker_processes 1;
pid {home}/pid;
error_log {home}/error.log warn;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {home}/body;
  proxy_temp_path {home}/proxy;
  fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi;
  scgi_temp_path {home}/scgi;
  keepalive_requests 100000000;
  upstream worker {{
    server unix:{socket};
    keepalive {connections};
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://worker{path};
      proxy_http_version 1.1;
      proxy_set_header Connection "";
    }}
  }}
}}
"""


@contextlib.contextmanager
def nginx(*, socket: Path, path: str) -> Iterator[str]:
    """Proxy every request to `path` on `socket`; yields the URL. Its user is ours, so that it may
    open the socket."""
    with tempfile.TemporaryDirectory(prefix="plng") as name:
        port = free_port()
        text = CONFIGURATION.format(
            home=name, socket=socket, connections=2 * CONNECTIONS, port=port, path=path
        )
        with started(Path(name), text, port=port):
            yield f"http://127.0.0.1:{port}/"


@contextlib.contextmanager
def started(home: Path, configuration: str, *, port: int, niceness: int = 0) -> Iterator[None]:
    """nginx with that configuration, as our user; it accepts on `port` when this yields. Raises
    DidNotStart."""
    file = home / "nginx.conf"
    file.write_text(
        f"user {getpass.getuser()};\n{configuration}" if os.geteuid() == 0 else configuration
    )
    process = priority.started(
        [program("nginx"), "-p", str(home), "-c", str(file)],
        niceness=niceness,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_connectable(port, process, deadline=time.monotonic() + 10)
        yield
    finally:
        process.send_signal(signal.SIGQUIT)  # finish what is in flight
        process.wait(10)
