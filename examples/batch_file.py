"""Rates reviews from a file, at low priority (`pilotlight batch`).

pilotlight deploy examples/batch_file.py
python examples/batch_file.py > reviews.jsonl
pilotlight batch create reviews.jsonl --endpoint /v1/functions/reviews/rate:invoke
pilotlight batch wait batch_… --output answers.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pilotlight

app = pilotlight.App("reviews")
ENDPOINT = "/v1/functions/reviews/rate:invoke"
REVIEWS = ("good, good", "bad", "good but late", "")


@app.function()
def rate(text: str) -> int:
    """How many good words a review has, less its bad ones."""
    if not text:
        raise ValueError("an empty review")
    words = text.replace(",", " ").split()
    return words.count("good") - words.count("bad")


def requests() -> Iterator[str]:
    """The lines of a batch: a request for each review."""
    for number, text in enumerate(REVIEWS):
        request = {
            "custom_id": f"review-{number}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {"text": text},
        }
        yield json.dumps(request)


if __name__ == "__main__":
    print("\n".join(requests()))
