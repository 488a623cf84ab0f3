"""Logs what a model is asked and answers, without who asked (`pilotlight log query`).

pilotlight deploy examples/predictions.py
pilotlight call churn/score --arg customer='{"email": "ada@example.com", "visits": 3}'
pilotlight log query churn/score "select version, avg(latency_ms) from predictions group by 1"

Would another revision answer as this one did? `email` is scrubbed in the log, and not used here:

pilotlight replay churn/score --on v2 --scrubbed
"""

from __future__ import annotations

from typing import TypedDict

import pilotlight

app = pilotlight.App("churn")


class Customer(TypedDict):
    """Features of a customer; `email` is for the caller's own use."""

    email: str
    visits: int


class Score(TypedDict):
    """Probability that the customer leaves, and whether to write to them."""

    probability: float
    write: bool


@app.function(
    log=pilotlight.PredictionLog(
        sample=1.0,  # every call: a real function with much traffic logs fewer
        inputs="full",
        outputs="full",
        scrub=["$..email"],
        keep="7d",
    )
)
def score(customer: Customer) -> Score:
    """Score one customer."""
    probability = 1 / (1 + customer["visits"])
    return Score(probability=probability, write=probability > 0.2)
