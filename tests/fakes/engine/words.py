"""How the fake engine counts and speaks: a tokenizer of short pieces, and a generator whose words
follow from the prompt alone."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable

_PIECE = re.compile(r"\s?[^\s]{1,4}|\s")
WORDS = tuple(f" {c}{v}" for c in "bdfgklmnprst" for v in "aeiou")
FIRST_WORD = 100
"""Token id of the first word that is ever said."""


class Tokenizer:
    """Pieces of at most four letters; remembers the pieces it has seen, so that it can give them
    back."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {FIRST_WORD + i: word for i, word in enumerate(WORDS)}

    def __repr__(self) -> str:
        return f"<Tokenizer seen={len(self._seen)}>"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        tokens = []
        for piece in _PIECE.findall(text):
            token = (
                FIRST_WORD + WORDS.index(piece)
                if piece in WORDS
                else 1000 + zlib.crc32(piece.encode()) % 100_000
            )
            self._seen[token] = piece
            tokens.append(token)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; those never seen are shown as `?`."""
        return "".join(self._seen.get(token, "?") for token in tokens)


def next_token(model: str, prompt: tuple[int, ...], index: int) -> int:
    """What a model says at a place after a prompt: always the same."""
    key = f"{model}|{prompt}|{index}".encode()
    return FIRST_WORD + int.from_bytes(hashlib.blake2b(key, digest_size=4).digest()) % len(WORDS)
