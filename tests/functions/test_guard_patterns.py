"""Patterns of guards: what they find, what they let pass, and that no text makes them slow."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.errors import InvalidInput
from pilotlight.spec.engines import GUARD_PATTERNS, GuardSpec
from pilotlight.spec.record_json import canonical_json, to_json
from pilotlight.validation.guard_patterns import EXACT_CHARS, GuardPatterns, patterns_of


def made(spec: GuardSpec) -> GuardPatterns:
    """The patterns of a guard."""
    return patterns_of(canonical_json(to_json(spec)))


ALL = made(GuardSpec(patterns=GUARD_PATTERNS))
FOUND = {
    "write to ada.lovelace+x@mail.example.co.uk now": "email",
    "an jürgen@münchen.de": "email",
    "card 4111 1111 1111 1111.": "credit_card",
    "card 4111-1111-1111-1111": "credit_card",
    "amex 378282246310005": "credit_card",
    "12 4111111111111111 09": "credit_card",
    "DE89 3704 0044 0532 0130 00 IS MINE": "iban",
    "NO9386011117947": "iban",
    "ssn 078-05-1120": "us_ssn",
    "-----BEGIN RSA PRIVATE KEY-----": "private_key",
    "-----BEGIN PRIVATE KEY-----": "private_key",
    "key sk-proj-abcdefghijklmnopqrst1": "api_key",
    "AKIAIOSFODNN7EXAMPLE": "api_key",
    "token: ghp_abcdefghijklmnopqrstuvwxyz0123456789": "api_key",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln": "api_key",
}
PASSED = (
    "hello world",
    "4111 1111 1111 1112",
    "1234567890123456",
    "41111111111111112222",
    "on 2026-11-30 at 12:30",
    "DE89 3704 0044 0532 0130 01",
    "000-12-3456",
    "a @ b, or user@host",
    "-----BEGIN CERTIFICATE-----",
    "sk-learn is a library",
    "class of the PROJECT",
    "",
)


@pytest.mark.parametrize("text, rule", FOUND.items())
def test_what_is_found_whole_and_with_text_around_it(text: str, rule: str) -> None:
    assert ALL.find(text) == rule
    assert ALL.find(f"before {text} after", is_end=False) == rule


@pytest.mark.parametrize("text", PASSED)
def test_what_is_not_found(text: str) -> None:
    assert ALL.find(text) == ""


@pytest.mark.parametrize("text, rule", FOUND.items())
def test_what_is_held_back_is_at_least_the_beginning_of_what_is_found(text: str, rule: str) -> None:
    patterns = made(GuardSpec(patterns=(rule,)))
    sent = 0
    for end in range(len(text) + 1):
        if patterns.find(text[:end], is_end=False):
            break
        sent = max(sent, end - patterns.hold(text[:end]))
    assert patterns.find(text)
    assert not patterns.find(text[:sent]), text[:sent]
    rest = made(GuardSpec(patterns=(rule,))).find(text[sent:])
    assert rest == rule, "what is held has all of it"


@pytest.mark.parametrize("text", ["The", "Hello, world. ", "so", "12 apples", "3 - 4 ="])
def test_ordinary_text_is_hardly_held_back(text: str) -> None:
    others = made(GuardSpec(patterns=tuple(set(GUARD_PATTERNS) - {"email"})))
    assert others.hold(text) <= 1 or text[0].isdigit()
    assert others.hold(f"{text}and so on ") == 0


def test_words_are_whole_in_any_case_and_with_any_spaces() -> None:
    patterns = made(GuardSpec(words=("Purple  Falcon", "ass", "über", "c++")))
    for text in ("the PURPLE\n falcon flies", "Über alles", "an ass", "in C++, say"):
        assert patterns.find(text) == "words", text
    for text in ("class", "purplefalcon", "gegenüber", "assume", "c+ +"):
        assert patterns.find(text) == "", text
    assert patterns.find("an ass", is_end=False) == "", "it may go on"
    assert patterns.hold("see the purple  fal") == len("purple  fal")
    assert patterns.hold("see the purple  cow") == 0


def test_expressions_have_names_and_are_certain_before_the_end() -> None:
    spec = GuardSpec(expressions={"ticket": r"TCK-\d{6}\b", "loud": "(?i)hush"}, window_chars=30)
    patterns = made(spec)
    assert (patterns.find("see TCK-123456"), patterns.find("HUSH")) == ("ticket", "loud")
    assert patterns.find("see TCK-123456", is_end=False) == "", "a digit may follow"
    assert patterns.find("see TCK-1234567", is_end=False) == ""
    assert patterns.find("see TCK-123456 ", is_end=False) == "ticket"
    assert patterns.hold("anything") == 30


@pytest.mark.parametrize(
    "expression, says",
    [
        (r"(?<=a)b", "guard"),
        (r"(a)\1", "guard"),
        ("(", "guard"),
        ("a{1,1000}b{1,1000}c{1,1000}", "states"),
    ],
)
def test_expressions_that_could_be_slow_or_are_none_are_refused(expression: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        made(GuardSpec(expressions={"own": expression}))


def test_half_of_a_surrogate_pair_does_not_stop_the_search() -> None:
    assert ALL.find("\ud800 a@b.com") == "email"
    assert ALL.find("\ud800") == ""


WORST = {
    "digits": "111 222 ",
    "cards": "4111 1111 1111 1112 ",
    "emails": "a@b ",
    "domains": "a@" + "a." * 50,
    "ibans": "DE89 ",
    "tokens": "sk-ab-",
    "jwt": "eyJ",
    "keys": "-----BEGIN ",
    "ssn": "666-12-3456 ",
}


@pytest.mark.parametrize("name", WORST)
def test_no_text_takes_more_than_linear_time(name: str) -> None:
    """Processor time of 4,096 characters, and of ten times as many."""
    spec = GuardSpec(patterns=GUARD_PATTERNS, expressions={"own": "(a+)+$|(a|a)*b"})
    patterns = made(spec)

    def cost_s(length: int) -> float:
        text = (WORST[name] * (length // len(WORST[name]) + 1))[:length]
        best = 1e9
        for _ in range(3):
            began = time.process_time()
            patterns.find(text)
            patterns.hold(text)
            best = min(best, time.process_time() - began)
        return best

    small, large = cost_s(EXACT_CHARS), cost_s(10 * EXACT_CHARS)
    assert small < 0.1
    assert large < 30 * small + 0.05


@pytest.mark.parametrize(
    "spec",
    [
        GuardSpec(expressions={"own": "a{1900}b"}),
        GuardSpec(expressions={"own": "[ab]*a(?:a|b){300}c"}),
        GuardSpec(words=tuple(f"{'a ' * 29}{n}" for n in range(20))),
    ],
)
def test_a_text_made_for_a_guard_takes_some_tens_of_milliseconds_at_most(spec: GuardSpec) -> None:
    """Of what is checked in place; the rest is checked elsewhere."""
    began = time.process_time()
    patterns = made(spec)
    assert time.process_time() - began < 1.0, "an activator compiles it on its event loop"
    length = next(n for n in range(8192, 0, -64) if patterns.is_inexpensive("." * n))
    for text in ("a" * length, "ab" * (length // 2), "a " * (length // 2)):
        began = time.process_time()
        if patterns.is_inexpensive(text):
            patterns.find(text, is_end=False)
        assert time.process_time() - began < 0.25


def test_the_cost_of_a_text_is_known_before_it_is_checked() -> None:
    assert ALL.is_inexpensive("x" * 100_000), "the first search finds nothing"
    assert ALL.is_inexpensive("4111 " * 100)
    assert not ALL.is_inexpensive("4111 " * 10_000)
    assert not ALL.is_inexpensive("x" * 1_000_000)


@given(
    st.text(alphabet="a1 @.-4D", max_size=40),
    st.sampled_from(sorted(FOUND)),
    st.text(alphabet="a1 @.-4D", max_size=10),
    st.lists(st.integers(1, 9), min_size=1, max_size=60),
)
def test_however_a_text_is_split_nothing_of_a_match_is_passed_on(
    before: str, found: str, after: str, sizes: list[int]
) -> None:
    """A first match cannot be found in what was passed on, nor be completed by what follows."""
    text = f"{before} {found} {after}"
    sent, end, turn = 0, 0, 0
    while end < len(text):
        end = min(len(text), end + sizes[turn % len(sizes)])
        turn += 1
        if ALL.find(text[:end], is_end=end == len(text)):
            break
        sent = max(sent, end - ALL.hold(text[:end]))
    else:
        raise AssertionError("it was not found")
    assert ALL.find(text[:sent], is_end=False) == ""
    assert found not in text[:sent]


@pytest.mark.parametrize(
    "given, says",
    [
        ({}, "checks nothing"),
        ({"words": ("x",), "input": False, "output": False}, "checks nothing"),
        ({"patterns": ("phone",)}, "'phone' is unknown: must be of api_key"),
        ({"words": ("",)}, "1 to 64 printable"),
        ({"words": ("x" * 64,) * 63}, "4032 characters, at most 4000"),
        ({"words": ("x",) * 201}, "201 words"),
        ({"words": ("a " * 29 + "b",) * 21}, "630 words with spaces between, at most 600"),
        ({"expressions": {"email": "x"}}, "no name of a pattern"),
        ({"expressions": {"a b": "x"}}, "letters, digits"),
        ({"expressions": {"a": ""}}, "1 to 256"),
        ({"expressions": {str(n): "x" for n in range(33)}}, "at most 32"),
        ({"function": "a/b/c"}, "must be a function such as"),
        ({"words": ("x",), "window_chars": 0}, "window_chars"),
    ],
)
def test_wrong_guards_are_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        GuardSpec(**given)  # type: ignore[arg-type]
