"""A volume: files that outlive an instance."""

from pathlib import Path

import pilotlight as modal

app = modal.App("style-volume")
volume = modal.Volume.from_name("style-volume", create_if_missing=True)


@app.function(volumes={"/data": volume})
def write(text: str) -> None:
    Path("/data/note.txt").write_text(text)
    volume.commit()


@app.function(volumes={"/data": volume})
def read() -> str:
    volume.reload()
    return Path("/data/note.txt").read_text()


@app.local_entrypoint()
def main() -> None:
    write.remote("kept")
    print("read:", read.remote())
