"""A generator: its items reach the caller while it runs.

    pilotlight call stream/count --stream -a upto=5 curl -N -H "Authorization: Bearer
    $PILOTLIGHT_API_KEY" -H "Accept: text/event-stream" -d '{"upto": 5}' \\
        $PILOTLIGHT_URL/v1/functions/stream/count:invoke
"""

import time
from collections.abc import Iterator

import pilotlight

app = pilotlight.App("stream")


@app.function(cpu=0.25, memory="256MiB", example=[2])
def count(upto: int, pause_s: float = 0.0) -> Iterator[dict[str, int]]:
    """Count from 1, `pause_s` apart, and say the square of each number."""
    for number in range(1, upto + 1):
        if pause_s:
            time.sleep(pause_s)
        yield {"number": number, "square": number * number}
