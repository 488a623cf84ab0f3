"""The function behind gateway.py: what it costs to get there is what is measured."""

import pilotlight

app = pilotlight.App("bench-echo")


@app.function(cpu=0.5, memory="256MiB", min_instances=1, max_instances=1, example=["ready"])
@pilotlight.concurrent(max_inputs=64)
async def echo(text: str) -> str:
    """What came in."""
    return text
