"""Rendezvous hashing: every node computes the same ranking of nodes for a key, without
communication.

Each node's score is a hash of (node, key); the highest owns the key. When a node joins or leaves,
only the keys that it wins or owned move: 1/n of them. Source: Thaler & Ravishankar, "Using
Name-Based Mappings to Increase Hit Rates", IEEE/ACM Transactions on Networking 6(1), 1998."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def ranked(key: str, nodes: Iterable[str]) -> list[str]:
    """`nodes` by descending score; the owner of `key` first."""
    return sorted(nodes, key=lambda node: (score(key, node), node), reverse=True)


def owner(key: str, nodes: Iterable[str]) -> str:
    """The owner of `key`. Raises ValueError if `nodes` is empty."""
    return max(nodes, key=lambda node: (score(key, node), node))


def score(key: str, node: str) -> int:
    """A score of 64 bits, independent for different keys."""
    return int.from_bytes(hashlib.blake2b(f"{node}\n{key}".encode(), digest_size=8).digest())
