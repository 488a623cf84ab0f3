"""Routes prompts with the same prefix to the same instance, whose KV memory already contains it.

`key_of` hashes a prefix, `by_key` selects the instance: each key has its own order of the instances
(highest random weight, Thaler and Ravishankar 1998), so that an instance that is added or removed
moves only its own share of the keys. The first instance in that order below its limit gets the
call. The limit is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam
2018): `LOAD` times the average, so that a very common prefix does not overload one instance. Calls
without a key go to the less loaded of two random instances (Mitzenmacher 2001)."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, TypeVar

BLOCK_CHARS: Final = 256
"""Prefixes are cut to whole blocks: four or five of an engine's own (16 tokens each), so that a
shared prefix is long enough to be worth the routing."""
BLOCKS: Final = 8
"""Two thousand characters distinguish system prompts. More would only distinguish chats, which
their first question already does."""
LOAD: Final = 1.25
"""How far above the average an instance may be loaded: c of the paper, which recommends 1.25."""
EASY: Final = 0.25
"""Below this share of its slots an instance is never above its limit. At low load the average is
one or two calls, and a second chat would be routed away from its cached prefix (simulated: 74 %
instead of 64 % of its tokens in memory)."""
_MAX_CHARS: Final = BLOCK_CHARS * BLOCKS
_MAX_VISITS: Final = 4 * _MAX_CHARS
"""Maximum number of values of a prompt to visit; most may be empty."""
_WORD: Final = (1 << 64) - 1
_LEADING: Final = frozenset({"system", "developer"})


class SlottedEngine(Protocol):
    """A routing target (an `Instance`) with at most `capacity` concurrent calls."""

    id: str
    capacity: int
    in_flight: int

    def has_slot(self, now: float) -> bool:
        """Whether it accepts one more call."""


P = TypeVar("P", bound=SlottedEngine)


def key_of(body: Mapping[str, Any], adapter: str = "") -> int | None:
    """Hash the prefix of a prompt. None when the prompt is too short.

    The prefix of a chat is its system messages and its first question, so that all its turns have
    one key; that of other prompts is their first blocks. `adapter`: the same text has different KV
    content under another adapter. An invalid body has the key None: the engine rejects it."""
    messages = body.get("messages")
    if isinstance(messages, list):
        text = _chat(messages)
    else:
        prompt = body.get("prompt", body.get("input"))
        text = _whole_blocks(_words(prompt))
    return None if not text else _hash(adapter + "\0" + text)


def _chat(messages: Sequence[Any]) -> str:
    """The system messages and the next message: the same in all turns."""
    parts: list[str] = []
    left = _MAX_CHARS
    for message in messages:
        if not isinstance(message, Mapping) or left <= 0:
            break
        role, words = str(message.get("role")), _words(message.get("content"))[:left]
        parts.append(role + "\0" + words)
        left -= len(words)
        if role not in _LEADING:
            break
    return "\0".join(parts)


def _whole_blocks(text: str) -> str:
    """The first 1, 2, 4 or 8 blocks: the key of a growing prompt changes three times, not with
    every block."""
    blocks = len(text) // BLOCK_CHARS
    return text[: BLOCK_CHARS << (blocks.bit_length() - 1)] if blocks else ""


def _words(content: Any) -> str:
    """The beginning of a prompt or message as text, at most _MAX_CHARS."""
    found: list[str] = []
    left = _MAX_CHARS
    for piece in _pieces(content):
        found.append(piece[:left])
        left -= len(piece)
        if left <= 0:
            break
    return "".join(found)


def _pieces(content: Any) -> Iterator[str]:
    """Yield texts and token ids of a nested value: lists are parts of a message, token ids, or
    several prompts."""
    pending: list[Iterator[Any]] = [iter((content,))]
    for _ in range(_MAX_VISITS):
        for part in pending[-1]:
            if isinstance(part, str):
                yield part
            elif isinstance(part, list):
                pending.append(iter(part))
            elif isinstance(part, Mapping):
                pending.append(iter(part.values()))
            elif isinstance(part, int):
                yield f"{part},"
            break
        else:
            pending.pop()
            if not pending:
                return


def _hash(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


@lru_cache(maxsize=4096)
def _seed_of(instance_id: str) -> int:
    return _hash(instance_id)


def _mixed(bits: int) -> int:
    """A 64-bit hash in which each bit depends on all of `bits` (the finalizer of splitmix64:
    Steele, Lea and Flood 2014)."""
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _WORD
    return bits ^ bits >> 31


def by_key(key: int, instances: Collection[P], now: float, *, load: float = LOAD) -> P | None:
    """Select the instance for a key: the first in the key's order that has a free slot and is below
    its limit.

    None: none is below its limit. Instances with less capacity have a lower limit."""
    slots = sum(instance.capacity for instance in instances)
    share = (
        max(EASY, load * (sum(instance.in_flight for instance in instances) + 1) / slots)
        if slots
        else 0.0
    )
    best: P | None = None
    best_weight = 0
    for instance in instances:
        if instance.has_slot(now) and instance.in_flight < math.ceil(share * instance.capacity):
            weight = _mixed(key ^ _seed_of(instance.id))
            if best is None or weight > best_weight:
                best, best_weight = instance, weight
    return best


def of_two(instances: Collection[P], now: float, chance: random.Random) -> P | None:
    """Select the less loaded of two random instances with a free slot; None when there is none."""
    free = [instance for instance in instances if instance.has_slot(now)]
    if len(free) > 2:
        free = chance.sample(free, 2)
    return min(free, key=lambda instance: instance.in_flight / instance.capacity, default=None)
