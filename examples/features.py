"""Scores payments by what the request says and what a Redis knows of the card's holder.

python examples/features.py model                  # trains: weights and their model_card.json
pilotlight secret set features FEATURES_REDIS_URL  # redis://:password@host:6379/0
FRAUD_MODEL=model pilotlight deploy examples/features.py
pilotlight call fraud/Fraud.score --arg holder=ada --arg amount=90
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pilotlight

PAYMENT = pilotlight.FeatureSchema({"amount": pilotlight.Feature(float, low=0)})
HOLDER = pilotlight.FeatureSchema(
    {
        "payments": pilotlight.Feature(int, default=0, low=0),
        "mean_amount": pilotlight.Feature(float, default=40.0, low=0),
    },
    version="30 days",
)
SCHEMA = pilotlight.FeatureSchema.merge(PAYMENT, HOLDER)
holders = pilotlight.Redis("holder:{holder}", HOLDER, max_age=86_400, deadline_ms=50)
model = pilotlight.Weights(os.environ.get("FRAUD_MODEL", "model"), name="fraud")
app = pilotlight.App("fraud")


def train(directory: Path) -> None:
    """Write a model, and beside it which features it was trained with."""
    row = SCHEMA.validate({"amount": 10.0, "payments": 3, "mean_amount": 12.5, "label": 0})
    directory.mkdir(parents=True, exist_ok=True)
    weights = dict(zip(row, (2.0, -0.1, 0.0), strict=True))
    (directory / "weights.json").write_text(json.dumps(weights))
    pilotlight.ModelCard(task="fraud", features=SCHEMA.hash).save(directory / "model_card.json")


@app.cls(
    weights=model,
    features=[PAYMENT, holders],
    secrets=[pilotlight.Secret.from_name("features")],
    log=pilotlight.PredictionLog(sample=1.0),
)
class Fraud:
    """A logistic regression."""

    @pilotlight.enter()
    def load(self) -> None:
        """Read the weights."""
        self.weights = json.loads((Path(model.path) / "weights.json").read_text())

    @pilotlight.method(example=["ada", 10.0])
    def score(self, holder: str, amount: float, *, features: pilotlight.Features) -> float:
        """Return the probability of fraud of a payment by this holder."""
        ratio = amount / features["mean_amount"] - 1
        score = self.weights["amount"] * ratio + self.weights["payments"] * features["payments"]
        return 1 / (1 + math.exp(-score))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
