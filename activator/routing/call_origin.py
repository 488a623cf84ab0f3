"""Where a call that a function makes comes from: its function as a caller, the attempt that made
it, and the functions before it.

The platform derives it from the call that runs on the instance; nothing of it is what user code
says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple, Self

from activator.routing.api_keys import FunctionPrincipal
from pilotlight import errors


class CallOrigin(NamedTuple):
    """The origin of a call.

    Attributes:
        record: id of the calling attempt's usage record, `<call>/<attempt>`, which names its
            instance.
        chain: functions that called each other, `app/function`, the first one first; the last one
            made the call."""

    record: str
    chain: tuple[str, ...]

    @property
    def function(self) -> str:
        """The calling function, `app/function`."""
        return self.chain[-1]

    def require_depth(self, called: str, limit: int) -> None:
        """Raise InvalidInput where `called` would be deeper than `limit` calls below the first
        function."""
        if len(self.chain) > limit:
            functions = " → ".join((*self.chain, called))
            raise errors.InvalidInput(
                f"call depth {limit} reached: {functions}: functions call each other without end, "
                f"or activator.max_call_depth is too low for them",
                depth=limit,
            )

    def to_json(self) -> list[object]:
        """The representation in a journal."""
        return [self.record, list(self.chain)]

    @classmethod
    def from_json(cls, body: Sequence[object]) -> Self:
        """Parse the result of `to_json`."""
        record, chain = body
        assert isinstance(chain, list)
        return cls(str(record), tuple(map(str, chain)))


class CallingFunction(NamedTuple):
    """A function that makes a request, as the activator that leases its instance identified it.

    Attributes:
        origin: the call in which it makes a call; None for a request that is no call."""

    principal: FunctionPrincipal
    origin: CallOrigin | None

    def to_json(self) -> bytes:
        """The representation in a header between activators: ASCII."""
        origin = None if self.origin is None else self.origin.to_json()
        return json.dumps([self.principal.key_id, origin]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Parse the result of `to_json`. Raises ValueError."""
        key_id, origin = json.loads(text)
        return cls(
            FunctionPrincipal(key_id), None if origin is None else CallOrigin.from_json(origin)
        )
