"""The cutover of a function: a revision that is assigned traffic gets it once it has an instance;
until then the previous revision answers (`balancing.cutover` begins and ends cutovers)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from activator.routing.api_keys import Principal
from activator.routing.call_target import CallTarget

if TYPE_CHECKING:
    from activator.routing.traffic_split import FunctionRouter, RoutingDecision


class Cutover:
    """The cutover of one function: `previous` answers for the `awaited` revisions, by revision key.

    Attributes:
        lacking: keys of revisions whose last start was refused for lack of capacity.
        broken: keys of revisions whose last start failed for another reason.
    """

    __slots__ = ("_serves", "awaited", "broken", "held", "lacking", "previous", "ticker", "timer")

    def __init__(
        self,
        previous: FunctionRouter,
        awaited: Mapping[str, CallTarget],
        held: tuple[CallTarget, ...],
        serves: Callable[[CallTarget], bool],
    ) -> None:
        """`serves`: returns whether a revision has an instance now, and may get calls."""
        self._serves = serves
        self.previous = previous
        self.awaited = dict(awaited)
        self.held = held
        self.lacking: set[str] = set()
        self.broken: set[str] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.ticker: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Cutover to {', '.join(sorted(self.awaited))}>"

    def decide(
        self, choice: RoutingDecision, caller: Principal, headers: Mapping[bytes, bytes]
    ) -> RoutingDecision:
        """Return the decision during the cutover; a unit of an experiment waits for its arm's own
        revision."""
        if choice.is_override or choice.arm or choice.target.key not in self.awaited:
            return choice
        before = self.previous.choose(caller, headers)
        may_come_back = choice.target.key in self.broken
        return (
            before
            if before.target.key not in self.awaited
            and (may_come_back or self._serves(before.target))
            else choice
        )


class Cutovers(Protocol):
    """Begins and ends the cutovers of functions."""

    def begin(self, name: str, routed: FunctionRouter, before: FunctionRouter) -> None:
        """Move a function from `before` to `routed`."""
        ...

    def cancel(self, name: str) -> None:
        """Cancel the cutover of a function that was removed or whose route was replaced."""
        ...

    def clear(self) -> None:
        """Cancel all cutovers."""
        ...
