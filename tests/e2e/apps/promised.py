"""A function that promises something, and breaks it when asked to."""

import pilotlight

app = pilotlight.App("promised")


@app.function(objectives=pilotlight.Objectives(availability=0.99, freeze=True))
def answer(ok: bool) -> str:
    if not ok:
        raise ValueError("as asked")
    return "yes"
