"""`MoneyStore` in the test's own process: members over one board, time in the test's hand."""

from __future__ import annotations

from collections.abc import Callable

from activator.billing.budgets.leases import BudgetClaim, BudgetGrant, granted
from activator.coordination.state import SharedStateUnreachable


class MoneyBoard:
    """What the members share.

    Attributes:
        is_down: every claim fails.
        mute: claims to come that are heard, and their answer lost.
    """

    def __init__(self, clock: Callable[[], float], *, grace_s: float = 2.0) -> None:
        self.clock = clock
        self.grace_s = grace_s
        self.is_down = False
        self.mute = 0
        self.claims = 0
        self.held: dict[tuple[str, str], dict[str, int]] = {}
        self.base: dict[tuple[str, str], int] = {}
        self._epoch: float | None = None

    def flush(self) -> None:
        """Lose the memory."""
        self.held.clear()
        self.base.clear()
        self._epoch = None

    def epoch(self) -> float:
        """When this memory began."""
        if self._epoch is None:
            self._epoch = self.clock()
        return self._epoch


class BoardMoney:
    """One member."""

    def __init__(self, board: MoneyBoard, *, member: str) -> None:
        self._board = board
        self._member = member

    async def claim(self, claim: BudgetClaim) -> BudgetGrant:
        """See MoneyStore."""
        board, key = self._board, (claim.budget, claim.period)
        if board.is_down:
            raise SharedStateUnreachable("the board is down")
        board.claims += 1
        wait_s = max(0.0, board.epoch() + board.grace_s - board.clock())
        base = board.base[key] = max(board.base.get(key, 0), claim.base)
        held = board.held.setdefault(key, {})
        room = (
            claim.amount
            - base
            - claim.held
            - sum(picos for member, picos in held.items() if member != self._member)
        )
        grant = (
            granted(room=room, need=claim.need, want=claim.want) if claim.want and not wait_s else 0
        )
        held[self._member] = claim.held + grant
        if board.mute:
            board.mute -= 1
            raise SharedStateUnreachable("the answer was lost")
        return BudgetGrant(granted=grant, base=base, wait_s=wait_s, epoch=str(board.epoch()))

    async def aclose(self) -> None:
        """Nothing to close."""
