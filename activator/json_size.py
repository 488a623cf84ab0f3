"""How much there is in JSON, counted before it is read: what decoding takes depends on its values far more than on its bytes.

Counting takes a few milliseconds for 10 MB. Text that stands inside strings does not count, so a long prompt is one value.
"""

from __future__ import annotations

from typing import Final

from pilotlight import errors

LIST_WEIGHT: Final = 6
"""A list or an object takes as long as so many numbers: measured, 0.3 to 1 microseconds against 0.15."""


def expect_few(data: bytes, most: int, hint: str) -> None:
    """Raises TooLarge, naming the bound, for JSON of more than `most` values; a list or an object counts as LIST_WEIGHT of them.

    `data`: UTF-8. `hint`: what to do about it.
    """
    if len(data) * LIST_WEIGHT > most and _weight(data) > most and _weight(_outside_strings(data, most)) > most:
        text = f"the JSON has more than {most} values (a list or an object counts as {LIST_WEIGHT}): {hint}"
        raise errors.TooLarge(text, limit_values=most)


def _weight(data: bytes) -> int:
    return data.count(b",") + data.count(b'"') // 2 + LIST_WEIGHT * (data.count(b"[") + data.count(b"{"))


def _outside_strings(data: bytes, most: int) -> bytes:
    """What is left without the insides of strings; all where there are more strings than `most`."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return plain if plain.count(b'"') // 2 > most else b'""'.join(plain.split(b'"')[::2])
