"""A web server that user code starts."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pilotlight

app = pilotlight.App("serving")


@app.function(cpu=0.1, max_instances=1, scaledown_window=60)
@pilotlight.web_server(8765, startup_timeout=60, example="/")
def site() -> None:
    """Serves a page."""
    pages = Path(tempfile.mkdtemp())
    (pages / "index.html").write_text("a page")
    subprocess.Popen([sys.executable, "-m", "http.server", "8765", "--directory", str(pages)])
