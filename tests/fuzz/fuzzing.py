"""How every target of this directory is fuzzed: inputs are bytes, made by Hypothesis from the
corpus and by each target's own strategy.

A run takes `--fuzz-seconds` per target (2 unless it is named). Inputs follow from `--fuzz-seed`, so
a run can be made again. What fails is shrunk, written to `.fuzz/<target>-<hash>`, and named in the
failure; once the defect is repaired, it is moved to `corpus/<target>/` under a name that says what
it shows, and `test_corpus` gives it to the target for ever."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path(__file__).parents[2] / ".fuzz"
DEFAULT_S = 2.0
_BATCH = 60
"""Inputs between two looks at the clock."""

Check = Callable[[bytes], None]
"""Gives one input to the target; raises AssertionError, or whatever the target must not raise."""


class Fuzzer:
    """The time and the seed of this run."""

    def __init__(self, seconds: float | None, seed: int | None) -> None:
        self.seconds = DEFAULT_S if seconds is None else seconds
        self.seed = (
            seed
            if seed is not None
            else 0
            if seconds is None
            else random.SystemRandom().randrange(2**32)
        )

    def __repr__(self) -> str:
        return f"<Fuzzer --fuzz-seconds {self.seconds:g} --fuzz-seed {self.seed}>"

    def run(self, target: str, inputs: st.SearchStrategy[bytes], check: Check) -> int:
        """Check inputs until the time is over; how many there were. Raises the failure of the
        smallest input that was found to fail."""
        ends_at, tried, failed = time.monotonic() + self.seconds, 0, b""

        def one(data: bytes) -> None:
            nonlocal tried, failed
            tried += 1
            try:
                check(data)
            except BaseException:
                failed = data
                raise

        batch = self.seed
        while time.monotonic() < ends_at:
            try:
                _batch(inputs, one, seed=batch)
            except Exception as e:
                e.add_note(
                    f"{target}: the input is in {_keep(target, failed)} ({self!r}, batch {batch})"
                )
                raise
            batch += 1
        return tried


def _batch(inputs: st.SearchStrategy[bytes], check: Check, *, seed: int) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=_BATCH,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(inputs)
    def run(data: bytes) -> None:
        check(data)

    run()


def _keep(target: str, data: bytes) -> Path:
    FOUND.mkdir(exist_ok=True)
    file = FOUND / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}"
    file.write_bytes(data)
    return file


def corpus(target: str) -> list[Path]:
    """The seeds of a target."""
    return sorted(file for file in (CORPUS / target).iterdir() if file.is_file())


def seeds(target: str) -> list[bytes]:
    """Their contents."""
    return [file.read_bytes() for file in corpus(target)]


@st.composite
def mutated(draw: st.DrawFn, of: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """One of `of` after a few changes: bytes changed, pieces removed, repeated, moved in from
    another one, and `words` put in."""
    data = draw(st.sampled_from(of))
    for _ in range(draw(st.integers(1, 6))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.sampled_from((0, 1, 2, 4, 16, 64, 512))))
        kind = draw(st.sampled_from(("byte", "cut", "again", "word", "word", "splice")))
        piece = data[begin:end]
        if kind == "byte":
            piece = draw(st.binary(min_size=1, max_size=4))
        elif kind == "cut":
            piece = b""
        elif kind == "again":
            piece *= draw(st.sampled_from((2, 3, 50)))
        elif kind == "word" and words:
            piece = draw(st.sampled_from(words))
        elif kind == "splice":
            other = draw(st.sampled_from(of))
            at = draw(st.integers(0, len(other)))
            piece = other[at : at + draw(st.sampled_from((8, 64, 512)))]
        data = data[:begin] + piece + data[end:]
    return data


_WEIRD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    10**400,
    1e308,
    -0.0,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "\0",
    "\ud800",
    "a\ud800",
    "../x",
    "/etc",
    "é",
    "\n",
    "x" * 300,
    "x" * 70_000,
    "9" * 5000,
    "1.5",
    "-1",
    "*",
    "%",
    "x'; DROP TABLE apps;--",
    "a" * 64,
    "0" * 64,
    [],
    {},
    [[]],
    [{}],
    {"": ""},
    {"a": None},
    ["x"] * 2000,
    {"\ud800": 1},
)
_DEPTHS = (50, 900, 960, 980, 990, 3000)
"""How deep a value may be nested: around the interpreter's bound of 1000, below which JSON is
parsed and above which it is refused."""


def _nested(depth: int, brackets: str) -> str:
    return "[" * depth + "]" * depth if brackets == "[" else '{"a":' * depth + "1" + "}" * depth


@cache
def _depth(document: bytes) -> int:
    """How deep its brackets are nested, those in strings included."""
    return max(accumulate((byte in b"[{") - (byte in b"]}") for byte in document), default=0)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    keys = (
        value.keys()
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


@st.composite
def json_mutated(draw: st.DrawFn, of: Sequence[bytes], words: Sequence[str] = ()) -> bytes:
    """One of the JSON documents after a few changes: values that are weird, or from elsewhere in
    it; keys renamed; values removed.

    Documents that are nested too deep to be copied are left out: how much of the stack is left
    differs between runs, and Hypothesis needs runs that repeat."""
    value = {"": json.loads(draw(st.sampled_from([one for one in of if _depth(one) <= 100])))}
    deep: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        places = _places(value)
        container, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(("weird", "weird", "weird", "own", "remove", "key", "deep")))
        if kind == "weird":
            container[key] = copy.deepcopy(
                draw(st.sampled_from((*_WEIRD, *words)) | st.text(max_size=8) | st.integers())
            )
        elif kind == "own":
            other, at = places[draw(st.integers(0, len(places) - 1))]
            container[key] = copy.deepcopy(other[at])
        elif kind == "remove" and container is not value:
            del container[key]
        elif kind == "key" and isinstance(container, dict) and container is not value:
            container[draw(st.sampled_from((*words, "", "x", "\0", "\ud800", "name")))] = (
                copy.deepcopy(container[key])
            )
        elif kind == "deep" and not deep:
            container[key] = "%%DEEP%%"
            deep = [_nested(draw(st.sampled_from(_DEPTHS)), draw(st.sampled_from("[{")))]
    text = json.dumps(
        value.get(""),
        separators=(",", ":"),
        ensure_ascii=draw(st.booleans()),
        sort_keys=draw(st.booleans()),
    )
    return text.replace('"%%DEEP%%"', deep[0] if deep else "").encode("utf-8", "surrogatepass")
