"""An app whose import fails where it runs, though not where it is deployed."""

import os

import pilotlight

app = pilotlight.App("incomplete")

if os.environ.get("PILOTLIGHT_WORKER"):
    print("about to import what is not there")
    import colourful_numbers  # type: ignore[import-not-found]  # noqa: F401  # missing on purpose


@app.function(cpu=0.25, memory="256MiB")
def double(n: int) -> int:
    """Never gets that far."""
    return 2 * n
