"""Which instance a prompt belongs to: prompts that begin alike meet on one instance, where that
beginning is in KV memory already.

`key_of` names a beginning, `by_key` picks the instance: each key has an order of its own over the
instances (highest random weight, Thaler and Ravishankar 1998), so that an instance that comes or
goes moves its own share of the keys and nobody else's; the first in that order which is not above
its bound takes the call. The bound is that of consistent hashing with bounded loads (Mirrokni,
Thorup and Zadimoghaddam 2018): `LOAD` times the average, so that a beginning which everybody shares
does not drown one instance. What has no key goes to the emptier of two at random (Mitzenmacher
2001)."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, TypeVar

BLOCK_CHARS: Final = 256
"""Beginnings are cut to whole blocks: four or five of an engine's own (16 tokens each), so that
what is shared is worth a detour."""
BLOCKS: Final = 8
"""Two thousand characters tell system prompts apart; more would only tell chats apart, which their
first question does."""
LOAD: Final = 1.25
"""How far above the average an instance may be loaded: c of the paper, which found 1.25 a good
trade."""
EASY: Final = 0.25
"""Below this share of its slots an instance is never above its bound: where little runs, the
average is a call or two, and a chat would be sent away from what is known of it because another one
is there (simulated: 74 % instead of 64 % of its tokens in memory)."""
_MAX_CHARS: Final = BLOCK_CHARS * BLOCKS
_MAX_VISITS: Final = 4 * _MAX_CHARS
"""Values of a prompt that are looked at for so many characters: most of what there is may be
empty."""
_WORD: Final = (1 << 64) - 1
_LEADING: Final = frozenset({"system", "developer"})


class Place(Protocol):
    """Where a call may go (an `Instance`): at most `node_capacity` at once."""

    id: str
    capacity: int
    in_flight: int

    def has_slot(self, now: float) -> bool:
        """Whether one more call may go in."""
        ...


P = TypeVar("P", bound=Place)


def key_of(body: Mapping[str, Any], adapter: str = "") -> int | None:
    """What the beginning of a prompt hashes to; None where there is too little of it to be worth
    anything.

    Of a chat it is its system messages and its first question, so that all turns of a chat have one
    key; of other prompts their first blocks. `adapter`: the same words mean other KV under another
    adapter. A body that is no proper request has None: the engine refuses it."""
    messages = body.get("messages")
    if isinstance(messages, list):
        text = _chat(messages)
    else:
        prompt = body.get("prompt", body.get("input"))
        text = _whole_blocks(_words(prompt))
    return None if not text else _hash(adapter + "\0" + text)


def _chat(messages: Sequence[Any]) -> str:
    """The system messages, and what follows them first: the same in all turns."""
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
    """The first 1, 2, 4 or 8 blocks: a prompt that grows from call to call changes its key three
    times, not with every block."""
    blocks = len(text) // BLOCK_CHARS
    return text[: BLOCK_CHARS << (blocks.bit_length() - 1)] if blocks else ""


def _words(content: Any) -> str:
    """The beginning of a prompt or of a message, as text: at most _MAX_CHARS of it, however long it
    is."""
    found: list[str] = []
    left = _MAX_CHARS
    for piece in _pieces(content):
        found.append(piece[:left])
        left -= len(piece)
        if left <= 0:
            break
    return "".join(found)


def _pieces(content: Any) -> Iterator[str]:
    """Texts and token ids of what is nested anyhow: lists are parts of a message, token ids, or
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
    """64 bits in which each depends on all of `bits` (the finalizer of splitmix64: Steele, Lea and
    Flood 2014)."""
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _WORD
    return bits ^ bits >> 31


def by_key(key: int, instances: Collection[P], now: float, *, load: float = LOAD) -> P | None:
    """The instance that calls with this key go to: the first in the key's order that has a free
    slot and is not above its bound.

    None: none is below its bound. Instances that take fewer calls have a lower bound.
    """
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
    """The emptier of two with a free slot, drawn at random; None when none has one."""
    free = [instance for instance in instances if instance.has_slot(now)]
    if len(free) > 2:
        free = chance.sample(free, 2)
    return min(free, key=lambda instance: instance.in_flight / instance.capacity, default=None)
