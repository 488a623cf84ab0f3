"""Version 1 of a reader of reviews: it counts words.

pilotlight deploy examples/canary/v1.py
"""

from typing import TypedDict

import pilotlight

app = pilotlight.App("reviews")

GOOD = frozenset({"good", "great", "love", "excellent", "fast"})
BAD = frozenset({"bad", "slow", "broken", "awful", "never"})


class Rating(TypedDict):
    """What a review says, from -1 to 1."""

    label: str
    score: float


@app.function(
    cpu=0.25,
    memory="256MiB",
    min_instances=1,
    max_instances=4,
    example=["great, and fast"],
    require={"accuracy": ">= 0.7"},
)
@pilotlight.concurrent(max_inputs=16)
async def rate(text: str) -> Rating:
    """Rate one review."""
    words = text.lower().replace(",", " ").split()
    score = sum((word in GOOD) - (word in BAD) for word in words) / max(1, len(words))
    return {"label": "good" if score >= 0 else "bad", "score": score}
