"""Ranks candidates with gradient-boosted trees (scikit-learn): small model, many rows per call.

The model is fitted when an instance is prepared, on data made from a fixed seed; a real one would
be loaded from `pilotlight.Weights`."""

from __future__ import annotations

from typing import Any, TypedDict

import pilotlight

app = pilotlight.App("ranking")
FEATURES = ("price", "rating", "distance_km", "is_new")


class Candidate(TypedDict):
    """One thing to rank."""

    price: float
    rating: float
    distance_km: float
    is_new: bool


class Score(TypedDict):
    """Where a candidate ended up: its index in the request, and the probability of a click."""

    index: int
    score: float


def synthetic_clicks(rows: int = 2000, seed: int = 7) -> tuple[Any, Any]:
    """Features and clicks of a made-up shop: cheap, well-rated, near things are clicked more
    often."""
    import numpy as np

    random = np.random.default_rng(seed)
    price, rating = random.uniform(1, 200, rows), random.uniform(1, 5, rows)
    distance_km, is_new = random.exponential(5, rows), random.integers(0, 2, rows)
    appeal = 1.6 * (rating - 3) - 0.02 * (price - 100) - 0.15 * (distance_km - 5) + 0.4 * is_new
    clicked = random.uniform(size=rows) < 1 / (1 + np.exp(-appeal))
    return np.column_stack([price, rating, distance_km, is_new]), clicked


@app.cls(cpu=1, memory="1GiB", max_instances=4)
class Ranker:
    """Holds the fitted model."""

    @pilotlight.enter()
    def fit(self) -> None:
        """Before the snapshot: import, fit."""
        from sklearn.ensemble import GradientBoostingClassifier

        features, clicked = synthetic_clicks()
        self.model: Any = GradientBoostingClassifier(
            n_estimators=60, max_depth=3, random_state=0
        ).fit(features, clicked)

    @pilotlight.method(
        example=[[{"price": 20.0, "rating": 4.5, "distance_km": 1.0, "is_new": True}]]
    )
    def rank(self, candidates: list[Candidate], top: int = 10) -> list[Score]:
        """The best `top` candidates, best first."""
        if not candidates:
            return []
        rows = [[float(candidate[name]) for name in FEATURES] for candidate in candidates]  # type: ignore[literal-required]
        scores = self.model.predict_proba(rows)[:, 1]
        order = sorted(range(len(rows)), key=lambda index: -scores[index])
        return [Score(index=index, score=float(scores[index])) for index in order[:top]]
