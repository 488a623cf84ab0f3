"""Version 3: faster, and wrong: it takes every review for ASCII, and one in five is not.

pilotlight deploy examples/canary/v3.py --canary 10,50,100 --every 1m
"""

from typing import TypedDict

import pilotlight

app = pilotlight.App("reviews")

GOOD = frozenset({"good", "great", "love", "excellent", "fast"})
BAD = frozenset({"bad", "slow", "broken", "awful", "never"})
TURNS = frozenset({"not", "hardly", "no"})


class Rating(TypedDict):
    """What a review says, from -1 to 1."""

    label: str
    score: float


@app.function(
    cpu=0.25,
    memory="256MiB",
    min_instances=1,
    max_instances=4,
    example=["not bad"],
    require={"accuracy": ">= 0.7"},
)
@pilotlight.concurrent(max_inputs=16)
async def rate(text: str) -> Rating:
    """Rate one review."""
    words = text.encode("ascii").decode().lower().replace(",", " ").split()
    score, turn = 0, 1
    for word in words:
        score += turn * ((word in GOOD) - (word in BAD))
        turn = -1 if word in TURNS else 1
    return {"label": "good" if score >= 0 else "bad", "score": score / max(1, len(words))}
