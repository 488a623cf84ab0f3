"""A function: here, there, and many times at once."""

import pilotlight as modal

app = modal.App("style-hello")


@app.function(cpu=0.5, memory=256)
def square(x: int) -> int:
    print(f"squaring {x}")
    return x * x


@app.local_entrypoint()
def main(count: int = 5) -> None:
    print("here:", square.local(12))
    print("there:", square.remote(12))
    print("many:", sum(square.map(range(count))))
