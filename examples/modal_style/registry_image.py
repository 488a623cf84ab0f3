"""A container image of a registry as the environment."""

import sys

import pilotlight as modal

image = modal.Image.from_registry("debian:trixie-slim", add_python="3.11").env({"LANG": "C.UTF-8"})
app = modal.App("style-registry", image=image)


@app.function()
def version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


@app.local_entrypoint()
def main() -> None:
    print("python:", version.remote())
