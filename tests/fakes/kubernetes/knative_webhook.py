"""Knative's admission webhook, as far as reference §2.3 goes (placeholder of its rules follows)."""

from __future__ import annotations

from tests.fakes.kubernetes.store import Store
from tests.fakes.kubernetes.writing import Review


class KnativeWebhook:
    """Refuses what Knative's webhook refuses."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, review: Review) -> None:
        """Raises Refused."""
