"""Failures that are tried again, and others that are not."""

import pilotlight as modal

app = modal.App("style-retries")

TRANSIENT = (TimeoutError, ConnectionError)


@app.function(retries=modal.Retries(max_retries=3, initial_delay=0.1, backoff_coefficient=2.0))
def fetch(kind: str) -> str | Exception:
    error: Exception = ConnectionError("reset") if kind == "network" else ValueError("bad input")
    if isinstance(error, TRANSIENT):
        raise error  # tried again
    return error  # an answer: not tried again


@app.local_entrypoint()
def main() -> None:
    print("answered:", repr(fetch.remote("input")))
    try:
        fetch.remote("network")
    except ConnectionError as e:
        print("raised:", e)
    print("collected:", list(fetch.map(["input", "network"], return_exceptions=True)))
