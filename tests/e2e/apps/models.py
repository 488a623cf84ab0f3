"""A web server that speaks OpenAI's API."""

import subprocess
import sys
from pathlib import Path

import pilotlight

app = pilotlight.App("models")


@app.function(cpu=0.1, max_instances=1, scaledown_window=60)
@pilotlight.concurrent(max_inputs=4)
@pilotlight.web_server(
    8766, startup_timeout=60, example="/health", openai=True, model="words-1", max_model_len=512
)
def words() -> None:
    """Repeats its prompt."""
    server = Path(__file__).with_name("model_server.py")
    subprocess.Popen([sys.executable, str(server), "8766"])
