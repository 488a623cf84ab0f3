"""Files of this machine in the image: at absolute paths, and in the working directory."""

import json
from pathlib import Path

import pilotlight as modal

here = Path(__file__).parent
image = (
    modal.Image.debian_slim()
    .add_local_dir(here / "data", remote_path="/assets/data")
    .add_local_file(here / "settings.json", "/root/settings.json")
)
app = modal.App("style-files", image=image)


@app.function()
def read() -> tuple[list[str], str]:
    colours = Path("/assets/data/colours.txt").read_text().split()
    with open("settings.json") as file:  # the working directory is /root
        return colours, json.load(file)["unit"]


@app.local_entrypoint()
def main() -> None:
    print("read:", read.remote())
