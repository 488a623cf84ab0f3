"""The patterns of guards: what is searched for in prompts and answers, also in an answer of which
only the beginning is known.

Everything here takes time in proportion to the text. A first search, by one automaton for all
rules, finds most texts to have nothing; what it finds is then checked exactly, with check digits.
Expressions of tenants run on that automaton only, which never backtracks; look-around and
back-references, which need more, are refused.

`find` says what is certain, and `hold` how many of the last characters could become a match with
what follows: those are not passed on yet."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from pilotlight.errors import InvalidInput
from pilotlight.validation.json_schema import Validator, compile_schema
from pilotlight.validation.schema_cost import pattern_weight

CONTEXT_CHARS: Final = 512
"""Characters before a text that `find` needs to see: more than the longest match of a built-in
pattern, and what decides where one begins."""
EXACT_CHARS: Final = 4096
"""Characters that are checked exactly in a few milliseconds: measured, up to 1.5 microseconds for
each, where every one is part of a number with a check digit."""
INLINE_NS: Final = 4e6
SEARCH_NS, STATE_NS = 10.0, 0.1
"""Nanoseconds of the first search, and per character, and per character and state of expressions
and words: measured, twice what it takes."""
WORST_NS: Final = 40e6
WORST_STATE_NS: Final = 15.0
"""The same where an automaton follows each state at each character: measured, for repetitions of
what repeats in a text. A check that takes this long once is run elsewhere (`guards.checks`)."""
KNOWN_GUARDS: Final = 1024
WORDS: Final = "words"
"""The name of the rule of all words."""

_DIGITS: Final = frozenset("0123456789")
_CARD_RUN: Final = re.compile(r"(?<![0-9A-Za-z])[0-9]+(?:[ -][0-9]+)*")
_CARD_DIGITS: Final = range(13, 20)
_CARD_LENGTHS: Final[Mapping[str, tuple[int, ...]]] = {
    "2": (16,),
    **dict.fromkeys(("30", "36", "38", "39"), (14,)),
    **dict.fromkeys(("34", "37"), (15,)),
    "35": (16,),
    "4": (13, 16, 19),
    "5": (16,),
    "6": (16, 17, 18, 19),
}
"""Digits of card numbers by how they begin, as issuers use them."""
_CARD_GROUPS: Final = 6
_CARD_CHARS: Final = 38
_DOUBLED: Final = bytes.maketrans(b"0123456789", bytes((0, 2, 4, 6, 8, 1, 3, 5, 7, 9)))
_SSN: Final = re.compile(
    r"(?<![0-9-])(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![0-9-])"
)
_SSN_CHARS: Final = 11
_EMAIL: Final = re.compile(
    r"[\w.!#$%&'*+/=?^`{|}~-]@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}",
)
_EMAIL_SIGNS: Final = frozenset(".!#$%&'*+/=?^_`{|}~-")
_LOCAL_CHARS, _DOMAIN_CHARS = 64, 255
_IBAN: Final = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}[0-9]{2}")
_IBAN_CHARS: Final = 42
_IBAN_BEGUN: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:[A-Z]{2}[0-9]{2}[A-Z0-9 ]*|[A-Z]{2}[0-9]?|[A-Z])\Z"
)
_IBAN_LENGTHS: Final[Mapping[str, int]] = {
    country: length
    for length, countries in {
        15: "NO",
        16: "BE",
        18: "DK FI FO GL NL",
        19: "MK SI",
        20: "AT BA EE KZ LT LU XK",
        21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA",
        23: "AE GI IL IQ TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST",
        26: "IS TR",
        27: "FR GR IT MC MR SM",
        28: "AL AZ BY CY DO GT HU LB PL SV",
        29: "BR EG PS QA UA",
        30: "JO KW MU",
        31: "MT SC",
        32: "LC",
    }.items()
    for country in countries.split()
}
"""Characters of an IBAN by country (ISO 13616, the IBAN registry)."""
_BEGIN: Final = "-----BEGIN"
_PRIVATE_KEY: Final = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY")
_PRIVATE_KEY_CHARS: Final = 75
_API_KEYS: Final = (
    r"sk-(?:[a-z]{2,8}[0-9]{0,2}-){0,3}[A-Za-z0-9_]{20}",
    r"(?:AKIA|ASIA)[0-9A-Z]{16}",
    r"gh[pousr]_[A-Za-z0-9]{36}",
    r"github_pat_[A-Za-z0-9_]{22}",
    r"glpat-[A-Za-z0-9_-]{20}",
    r"xox[abeoprs]-[A-Za-z0-9-]{10}",
    r"AIza[0-9A-Za-z_-]{35}",
    r"hf_[A-Za-z0-9]{30}",
    r"npm_[A-Za-z0-9]{36}",
    r"eyJ[A-Za-z0-9_-]{8,250}\.eyJ[A-Za-z0-9_-]{8}",
)
_API_KEY: Final = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_API_KEYS)})")
_API_KEY_CHARS: Final = 300
_API_PREFIXES: Final = (
    *("sk-", "AKIA", "ASIA", "github_pat_", "glpat-", "AIza", "hf_", "npm_", "eyJ"),
    *(f"gh{kind}_" for kind in "pousr"),
    *(f"xox{kind}-" for kind in "abeoprs"),
)
_API_BEGUN: Final = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_API_PREFIXES)})[\w.-]*\Z")
_API_PARTS: Final = frozenset(
    prefix[:length] for prefix in _API_PREFIXES for length in range(1, len(prefix))
)
_SPECIAL: Final = re.compile(r"([\\.^$*+?()\[\]{}|/])")
_NO_WORD: Final = r"[^\p{L}\p{N}_]"
_SPACE: Final = "[\t-\r \x85\ufeff\\p{Z}]+"
r"""As `\s+`, which the library would replace again and again: minutes for a thousand of them."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """One rule. `candidate`: an expression for the automaton, which also finds texts that `find`
    does not. `find(text, is_end)`, `hold(text)`: as of `GuardPatterns`."""

    candidate: str
    find: Callable[[str, bool], bool]
    hold: Callable[[str], int]


class GuardPatterns:
    """The compiled patterns of one guard. Immutable.

    Attributes:
        context_chars: characters before a text that `find` needs to see."""

    def __init__(
        self,
        *,
        patterns: Sequence[str],
        words: Sequence[str],
        expressions: Mapping[str, str],
        window_chars: int,
    ) -> None:
        """As of a GuardSpec, which has bounds for them. Raises InvalidInput for an expression that
        is none, or that needs backtracking."""
        rules = {name: _BUILT_IN[name] for name in dict.fromkeys(patterns)}
        if words:
            rules[WORDS] = _words(words)
        for name, expression in expressions.items():
            rules[name] = _expression(name, expression, window_chars)
        self._rules = rules
        weight = sum(map(pattern_weight, expressions.values()))
        at_once = weight + sum(len(word.split()) for word in words)
        weight += sum(map(len, words))
        self._inline_chars = int(
            min(
                INLINE_NS / (SEARCH_NS + weight * STATE_NS),
                WORST_NS / (SEARCH_NS + at_once * WORST_STATE_NS),
            )
        )
        self.context_chars = CONTEXT_CHARS + window_chars
        self._candidates = (
            _automaton("|".join(f"(?:{rule.candidate})" for rule in rules.values()), "guard")
            if rules
            else None
        )

    def __repr__(self) -> str:
        return f"<GuardPatterns {', '.join(self._rules)}>"

    def is_inexpensive(self, text: str) -> bool:
        """Whether `find` takes a few milliseconds at most, whatever the text is; mostly it takes
        some microseconds. Runs the first search."""
        if self._candidates is None or len(text) <= min(EXACT_CHARS, self._inline_chars):
            return True
        return len(text) <= self._inline_chars and not _is_found(self._candidates, text + "\n")

    def find(self, text: str, *, is_end: bool = True) -> str:
        """Return the name of the first rule that matches; "" = none does. `is_end`: nothing
        follows; otherwise a match is found once nothing that follows can undo it."""
        if self._candidates is None or not text:
            return ""
        if is_end:
            text += "\n"  # words end before something
        if not _is_found(self._candidates, text):
            return ""
        return next(
            (name for name, rule in self._rules.items() if rule.find(text, is_end)),
            "",
        )

    def hold(self, text: str) -> int:
        """Return how many of the last characters may be the beginning of a match."""
        return max((rule.hold(text) for rule in self._rules.values()), default=0)


@lru_cache(maxsize=KNOWN_GUARDS)
def patterns_of(document: bytes) -> GuardPatterns:
    """Return the patterns of a GuardSpec in JSON, compiled once for all revisions with the same
    guard. Raises InvalidInput."""
    spec = json.loads(document)
    return GuardPatterns(
        patterns=spec["patterns"],
        words=spec["words"],
        expressions=spec["expressions"],
        window_chars=spec["window_chars"],
    )


def _automaton(expression: str, where: str) -> Validator:
    """Compile an expression. Raises InvalidInput."""
    validator, is_linear = compile_schema({"pattern": expression}, where)
    if not is_linear:
        raise InvalidInput(
            f"{where}: look-around and back-references are not possible: write it without them",
            parameter="guard",
        )
    return validator


def _is_found(validator: Validator, text: str) -> bool:
    try:
        return validator.is_valid(text)
    except (UnicodeEncodeError, ValueError):  # half of a surrogate pair, which is no character
        return validator.is_valid(text.encode("utf-8", "replace").decode())


# -- what tenants write ----------------------------------------------------------------------------
def _expression(name: str, expression: str, window_chars: int) -> _Rule:
    own = _automaton(expression, f"guard: expression {name}")

    def find(text: str, is_end: bool) -> bool:
        # with one character less, too: the end of what is known is no end of a word
        return _is_found(own, text) and (is_end or _is_found(own, text[:-1]))

    return _Rule(expression, find, lambda _: window_chars)


def _words(words: Sequence[str]) -> _Rule:
    spaced = sorted({" ".join(word.split()).lower() for word in words})
    any_of = "|".join(_SPECIAL.sub(r"\\\1", word).replace(" ", _SPACE) for word in spaced)
    expression = rf"(?i)(?:^|{_NO_WORD})(?:{any_of}){_NO_WORD}"
    own = _automaton(expression, "guard: words")
    begun = frozenset(word[:length] for word in spaced for length in range(1, len(word) + 1))
    most = max(map(len, spaced))

    def hold(text: str) -> int:
        tail = text[-4 * most :]
        plain, starts = _with_single_spaces(tail)
        for length in range(min(most, len(plain)), 0, -1):
            if plain[-length:] in begun:
                return len(tail) - starts[-length]
        return 0

    return _Rule(expression, lambda text, _: _is_found(own, text), hold)


def _with_single_spaces(text: str) -> tuple[str, list[int]]:
    """Return a text in lower case with single spaces, and where each of its characters was."""
    plain: list[str] = []
    starts: list[int] = []
    for at, char in enumerate(text):
        if char.isspace():
            if plain and plain[-1] == " ":
                continue
            char = " "
        plain.append(char.lower()[:1])
        starts.append(at)
    return "".join(plain), starts


# -- built in --------------------------------------------------------------------------------------
def _find_email(text: str, _is_end: bool) -> bool:
    return _EMAIL.search(text) is not None


def _hold_email(text: str) -> int:
    """The last word; with "@" in it, from its beginning."""
    end = len(text)
    at = _word_start(text, end, _DOMAIN_CHARS)
    if at and text[at - 1] == "@":
        return end - _word_start(text, at - 1, _LOCAL_CHARS)
    return min(end - at, _LOCAL_CHARS)


def _word_start(text: str, end: int, most: int) -> int:
    least = max(0, end - most)
    while end > least and (text[end - 1] in _EMAIL_SIGNS or text[end - 1].isalnum()):
        end -= 1
    return end


def _find_card(text: str, is_end: bool) -> bool:
    for run in _CARD_RUN.finditer(text):
        if run.end() - run.start() < _CARD_DIGITS.start:
            continue
        groups = re.split("[ -]", run[0])
        if run.end() == len(text) and not is_end:
            groups.pop()  # more digits may follow
        if any(_is_card(number) for number in _card_numbers(groups)):
            return True
    return False


def _card_numbers(groups: list[str]) -> Iterator[str]:
    for first in range(len(groups)):
        digits = 0
        for last in range(first, min(first + _CARD_GROUPS, len(groups))):
            digits += len(groups[last])
            if digits >= _CARD_DIGITS.stop:
                break
            if digits in _CARD_DIGITS:
                yield "".join(groups[first : last + 1])


def _is_card(number: str) -> bool:
    lengths = _CARD_LENGTHS.get(number[:2]) or _CARD_LENGTHS.get(number[0], ())
    return len(number) in lengths and _is_luhn(number)


def _is_luhn(number: str) -> bool:
    """ISO/IEC 7812-1, Annex B."""
    digits = number.encode()
    plain, doubled = digits[-1::-2], digits[-2::-2].translate(_DOUBLED)
    return (sum(plain) - 48 * len(plain) + sum(doubled)) % 10 == 0


def _hold_digits(most: int) -> Callable[[str], int]:
    def hold(text: str) -> int:
        start = end = len(text)
        least = max(0, end - most)
        while start > least and (text[start - 1] in _DIGITS or text[start - 1] in " -"):
            start -= 1
        while start < end and text[start] in " -":
            start += 1
        return end - start

    return hold


def _find_ssn(text: str, is_end: bool) -> bool:
    return any(is_end or one.end() < len(text) for one in _SSN.finditer(text))


def _find_iban(text: str, _is_end: bool) -> bool:
    for begun in _IBAN.finditer(text):
        length = _IBAN_LENGTHS.get(begun[0][:2])
        compact = text[begun.start() : begun.start() + _IBAN_CHARS].replace(" ", "")[:length]
        if length is not None and len(compact) == length and _is_iban(compact):
            return True
    return False


def _is_iban(compact: str) -> bool:
    """ISO 13616: the remainder of the rearranged number is 1 (ISO/IEC 7064, MOD 97-10)."""
    if not compact.isascii() or not compact.isalnum() or not compact.isupper():
        return False
    return int("".join(str(int(char, 36)) for char in compact[4:] + compact[:4])) % 97 == 1


def _hold_iban(text: str) -> int:
    begun = _IBAN_BEGUN.search(text[-_IBAN_CHARS:])
    return begun.end() - begun.start() if begun is not None else 0


def _find_private_key(text: str, _is_end: bool) -> bool:
    return _PRIVATE_KEY.search(text) is not None


def _hold_private_key(text: str) -> int:
    tail = text[-_PRIVATE_KEY_CHARS:]
    at = tail.rfind(_BEGIN)
    if at >= 0 and "\n" not in tail[at:]:
        return len(tail) - at
    return next((n for n in range(len(_BEGIN) - 1, 0, -1) if tail.endswith(_BEGIN[:n])), 0)


def _find_api_key(text: str, _is_end: bool) -> bool:
    return _API_KEY.search(text) is not None


def _hold_api_key(text: str) -> int:
    start = end = len(text)
    least = max(0, end - _API_KEY_CHARS)
    while start > least and (text[start - 1].isalnum() or text[start - 1] in "_.-"):
        start -= 1
    word = text[start:]
    if begun := _API_BEGUN.search(word):
        return len(word) - begun.start()
    for length in range(min(len(word), 10), 0, -1):
        if word[-length:] in _API_PARTS and not word[-length - 1 : -length].isalnum():
            return length
    return 0


_BUILT_IN: Final[Mapping[str, _Rule]] = {
    "api_key": _Rule("|".join(_API_KEYS), _find_api_key, _hold_api_key),
    "credit_card": _Rule(r"[0-9](?:[ -]?[0-9]){12}", _find_card, _hold_digits(_CARD_CHARS)),
    "email": _Rule(r"[^\s@]@[^\s@]", _find_email, _hold_email),
    "iban": _Rule(r"[A-Z]{2}[0-9]{2} ?[A-Z0-9]", _find_iban, _hold_iban),
    "private_key": _Rule(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY", _find_private_key, _hold_private_key),
    "us_ssn": _Rule(r"[0-9]{3}-[0-9]{2}-[0-9]{4}", _find_ssn, _hold_digits(_SSN_CHARS)),
}
