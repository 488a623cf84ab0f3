"""A web server of any kind, started as a process: here Python's own, which serves a directory."""

import subprocess
import sys
from pathlib import Path

import pilotlight as modal

app = modal.App("style-web-server")


@app.function()
@modal.concurrent(max_inputs=10)
@modal.web_server(8000, startup_timeout=30)
def files() -> None:
    Path("index.html").write_text("Hello from a process")
    subprocess.Popen([sys.executable, "-m", "http.server", "8000"])
