"""Answers equal questions from memory, without running the model again.

pilotlight deploy examples/response_cache.py
pilotlight call geo/locate --arg address="10 Downing Street"     # runs
pilotlight call geo/locate --arg address="10 Downing Street"     # Pilotlight-Cache: hit
"""

from __future__ import annotations

import hashlib
import time
from typing import TypedDict

import pilotlight

app = pilotlight.App("geo")


class Place(TypedDict):
    """Where an address is, and when the model was asked."""

    latitude: float
    longitude: float
    computed_at: float


@app.function(cache=pilotlight.ResponseCache("1h", max_bytes=4 * 2**20, shared=True))
def locate(address: str) -> Place:
    """Locate an address: a hash stands for a slow model that always says the same."""
    time.sleep(0.2)
    digest = hashlib.sha256(address.strip().lower().encode()).digest()
    return Place(
        latitude=digest[0] / 256 * 180 - 90,
        longitude=digest[1] / 256 * 360 - 180,
        computed_at=time.time(),
    )
