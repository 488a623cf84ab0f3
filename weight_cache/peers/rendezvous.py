"""Rendezvous hashing: every node ranks the nodes for a key alike, without asking anybody.

Each node scores a hash of (node, key); the highest owns the key. When a node joins or leaves, only
the keys that it wins or owned move: 1/n of them. Source: Thaler & Ravishankar, "Using Name-Based
Mappings to Increase Hit Rates", IEEE/ACM Transactions on Networking 6(1), 1998."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def ranked(key: str, nodes: Iterable[str]) -> list[str]:
    """`nodes`, the owner of `key` first."""
    return sorted(nodes, key=lambda node: (score(key, node), node), reverse=True)


def owner(key: str, nodes: Iterable[str]) -> str:
    """Who owns `key`. Raises ValueError without nodes."""
    return max(nodes, key=lambda node: (score(key, node), node))


def score(key: str, node: str) -> int:
    """64 bits; different keys give a node independent scores."""
    return int.from_bytes(hashlib.blake2b(f"{node}\n{key}".encode(), digest_size=8).digest())
