"""Records the answers of the warm-up and checks that a restored copy reproduces them.

Answers are stored as digests over their values: exact bytes for floats, arrays and tensors, members
for other objects. This limits the size of a snapshot and is independent of later changes to an
answer. The answer itself is stored only if the function declares `check=`.

A function that never answers the same example twice alike (a clock, a counter, random numbers)
cannot be compared; then only the type of its answer is checked, and the proof notes this."""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pilotlight.worker.user_code.target import Method

MAX_SHOWN = 200
"""Maximum number of characters of an answer in a message."""
_MAX_DEPTH = 100
_MAX_PARTS = 200_000
"""Maximum number of values in one digest: some 0.3 s."""


class ProofFailed(Exception):
    """Raised when a restored copy answers an example differently than before the snapshot."""


class AnswersExample(Protocol):
    """Calls a method with its example."""

    def __call__(self, method: Method) -> Any:
        """The method's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAnswer:
    """One recorded answer; `value` is stored for `check=` only."""

    digest: bytes
    type_name: str
    shown: str
    value: Any

    @classmethod
    def of(cls, method: Method, answer: Any) -> ExpectedAnswer:
        """Record an answer, reduced to what a comparison needs."""
        value = answer if method.check is not None else None
        return cls(
            digest=digest(answer),
            type_name=type(answer).__qualname__,
            shown=_abbreviate(answer),
            value=value,
        )


def compare(
    methods: Mapping[str, Method],
    known: Mapping[str, ExpectedAnswer],
    answer_example: AnswersExample,
) -> list[str]:
    """Answer every example again and compare. Returns notes on what could not be compared; raises
    ProofFailed, and what a method raises."""
    notes = []
    for name, expected in known.items():
        method = methods[name]
        answer = answer_example(method)
        if method.check is not None:
            if method.check(answer, expected.value) is False:
                raise ProofFailed(
                    f"check= of {_title(method)} rejects the answer {_abbreviate(answer)}; "
                    f"before the snapshot it answered {expected.shown}"
                )
        elif digest(answer) != expected.digest:
            notes.append(_nondeterministic(method, answer, expected, answer_example))
    return notes


def summary(known: Mapping[str, ExpectedAnswer]) -> dict[str, list[str]]:
    """Digest (hex) and type of each recorded answer, for a comparison with another process."""
    return {name: [answer.digest.hex(), answer.type_name] for name, answer in known.items()}


def from_summary(
    answers: Mapping[str, Sequence[str]], methods: Mapping[str, Method]
) -> dict[str, ExpectedAnswer]:
    """The reverse of `summary`, for the methods that can be compared by it: of those with `check=`
    the answer itself would be needed. Raises ValueError or TypeError if it is invalid."""
    return {
        name: ExpectedAnswer(
            digest=bytes.fromhex(digest), type_name=type_name, shown="another value", value=None
        )
        for name, (digest, type_name) in answers.items()
        if name in methods and methods[name].check is None
    }


def _nondeterministic(
    method: Method, answer: Any, expected: ExpectedAnswer, answer_example: AnswersExample
) -> str:
    again = answer_example(method)
    difference = (
        f"{_title(method)} answers its example with {_abbreviate(answer)}; before the "
        f"snapshot it answered {expected.shown}"
    )
    if digest(again) == digest(answer) or type(answer).__qualname__ != expected.type_name:
        raise ProofFailed(f"{difference}. If both answers are acceptable, declare check=")
    return (
        f"{_title(method)} never gives the same answer to its example twice: only its type was "
        f"compared. Declare check= to compare more"
    )


def _title(method: Method) -> str:
    return method.name or str(getattr(method.call, "__name__", "the function"))


def _abbreviate(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as e:  # a user's __repr__ may raise anything; this is for a message only
        text = f"<{type(value).__qualname__}, whose __repr__ raised {type(e).__name__}>"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def digest(value: Any) -> bytes:
    """A digest over types and values, equal for equal answers; covers the first _MAX_PARTS values
    only."""
    walk = _ValueHash()
    try:
        walk.feed(value, 0)
    except Exception as e:  # members of user objects may raise anything when they are read
        walk.hashing.update(type(e).__qualname__.encode())
    return walk.hashing.digest()


class _ValueHash:
    """One walk over a value. Cyclic references are followed up to a limit."""

    def __init__(self) -> None:
        self.hashing = hashlib.blake2b(digest_size=16)
        self._parts = 0

    def feed(self, value: Any, depth: int) -> None:
        self._parts += 1
        if depth > _MAX_DEPTH or self._parts > _MAX_PARTS:
            return
        kind = type(value)
        self.hashing.update(f"{kind.__module__}.{kind.__qualname__}:".encode())
        data = _scalar(value)
        if data is None:
            data = _array(value)
        if data is not None:
            self._sized(data)
        elif isinstance(value, Mapping):
            self._unordered(value.items(), depth)
        elif isinstance(value, set | frozenset):
            self._unordered(value, depth)
        elif isinstance(value, list | tuple):
            self.hashing.update(struct.pack("=q", len(value)))
            for item in value:
                self.feed(item, depth + 1)
        else:
            self.feed(_members(value), depth + 1)

    def _sized(self, data: bytes) -> None:
        self.hashing.update(struct.pack("=q", len(data)))
        self.hashing.update(data)

    def _unordered(self, items: Iterable[Any], depth: int) -> None:
        outer, digests = self.hashing, []
        for item in items:
            self.hashing = hashlib.blake2b(digest_size=16)
            self.feed(item, depth + 1)
            digests.append(self.hashing.digest())
        self.hashing = outer
        self._sized(b"".join(sorted(digests)))


def _scalar(value: Any) -> bytes | None:
    if value is None or isinstance(value, bool | int | str):
        return repr(value).encode("utf-8", "surrogatepass")
    if isinstance(value, float):
        return struct.pack("=d", value)
    if isinstance(value, complex):
        return struct.pack("=dd", value.real, value.imag)
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else None


def _array(value: Any) -> bytes | None:
    """The bytes of a numpy array or scalar, or of a torch tensor, with shape and dtype; None for
    anything else."""
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dense = (
            value.dequantize()
            if value.is_quantized
            else value.to_dense()
            if value.layout is not torch.strided
            else value
        )
        plain = dense.detach().cpu().contiguous().resolve_conj().resolve_neg()
        data = plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return f"{value.dtype}{tuple(value.shape)}".encode() + data
    if (
        numpy is not None
        and isinstance(value, numpy.ndarray | numpy.generic)
        and not value.dtype.hasobject
    ):
        return f"{value.dtype.str}{value.shape}".encode() + bytes(value.tobytes())
    return None


def _members(value: Any) -> Any:
    """The parts of any other object: its attributes; without any, its repr, unless that contains
    its address."""
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", "")
    slots = [
        name for base in type(value).__mro__ for name in _names(vars(base).get("__slots__", ()))
    ]
    members = {
        **getattr(value, "__dict__", {}),
        **{name: getattr(value, name) for name in slots if hasattr(value, name)},
    }
    if members:
        return members
    if callable(to_list := getattr(value, "tolist", None)):  # a numpy array of objects
        return to_list()
    text = repr(value)
    return "" if " at 0x" in text else text


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
