"""The app, with the functions of another file."""

import pilotlight as modal
from modal_style.several_files.text import app as text_app
from modal_style.several_files.text import count

app = modal.App("style-several-files").include(text_app)


@app.function()
def compare(one: str, other: str) -> int:
    return count.remote(one) - count.remote(other)


@app.local_entrypoint()
def main() -> None:
    print("difference:", compare.remote("a  b   c", "d"))
