"""Secrets: by name, from values, and from variables of this machine."""

import os

import pilotlight as modal

app = modal.App("style-secrets", secrets=[modal.Secret.from_dict({"REGION": "eu"})])


@app.function(
    secrets=[
        modal.Secret.from_dict({"API_TOKEN": "t-123"}),
        modal.Secret.from_local_environ(["HOME"]),
    ],
    env={"MODE": "test"},
)
def show() -> list[bool]:
    return [name in os.environ for name in ("REGION", "API_TOKEN", "HOME", "MODE")]


@app.local_entrypoint()
def main() -> None:
    print("set:", show.remote())
