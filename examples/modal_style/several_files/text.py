"""One part of the app."""

import pilotlight as modal

app = modal.App("style-text")


@app.function()
def clean(text: str) -> str:
    return " ".join(text.split()).lower()


@app.function()
def count(text: str) -> int:
    return len(clean.remote(text).split())
