"""Finds out when what a model is asked is no longer what it was trained on (`pilotlight drift`).

pilotlight deploy examples/drift.py
pilotlight drift baseline loans/score --from training.jsonl  # lines: {"input": …, "output": …}
pilotlight call loans/score --arg age=30 --arg income=2400.0 --arg country=DE
pilotlight drift show loans/score
"""

from __future__ import annotations

import math
from typing import TypedDict

import pilotlight

app = pilotlight.App("loans")


class Score(TypedDict):
    """Probability that a loan is not paid back."""

    probability: float


@app.function(
    log=pilotlight.PredictionLog(sample=1.0, inputs="none", outputs="summary"),
    monitor=pilotlight.Monitor(
        features={"$.age": (18, 120), "$.income": None, "$.country": None},
        prediction="$.probability",
        label="label",  # of `pilotlight feedback send ID --label defaulted`
        positive="defaulted",
        slices=["$.country"],
        window="24h",
        min_rows=100,
        quality={"brier": 0.2},
    ),
)
def score(age: int, income: float, country: str) -> Score:
    """Score one application."""
    risk = 1.5 - income / 2000 - (age - 18) / 60 + (0.3 if country == "XX" else 0.0)
    return Score(probability=1 / (1 + math.exp(-risk)))
