"""A model whose prompts and answers are checked: patterns for personal data, and a function.

    pilotlight deploy examples/guard.py
    curl -H "Authorization: Bearer $PILOTLIGHT_API_KEY" -H 'Content-Type: application/json' \\
        $PILOTLIGHT_URL/v1/chat/completions -d '{"model": "guarded/parrot", "stream": true,
        "messages": [{"role": "user", "content": "read me the card"}]}'

The model is a small server that speaks OpenAI's API and repeats its prompt (`guard_model.py`).
For a real one declare `app.vllm(…, guard=GUARD)`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pilotlight

app = pilotlight.App("guarded")


@app.function(min_instances=1)
def judge(stage: str, text: str) -> dict[str, Any]:
    """Ask a classifier here; this one knows one word."""
    if "silly" in text.lower():
        return {"allow": False, "rule": "rude"}
    return {"allow": True}


GUARD = pilotlight.Guard(
    patterns=["credit_card", "email", "api_key"],
    words=["Project Falcon"],
    expressions={"ticket": "TCK-[0-9]{6}"},
    function=judge,
    window_chars=20,
)


@app.function(guard=GUARD)
@pilotlight.web_server(8000, openai=True)
def parrot() -> None:
    """Start the server."""
    server = Path(__file__).with_name("guard_model.py")
    subprocess.Popen([sys.executable, str(server), "8000"])
