"""The smallest function.

pilotlight run examples/hello.py --name Ada       # once, without deploying it
pilotlight deploy examples/hello.py
pilotlight call hello/hello --arg name=Ada
"""

import pilotlight

app = pilotlight.App("hello")


@app.function(cpu=0.25, memory="256MiB", example=["world"])
def hello(name: str = "world") -> str:
    """Greet somebody."""
    return f"Hello, {name}!"
