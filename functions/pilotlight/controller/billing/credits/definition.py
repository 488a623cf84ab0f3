"""What a grant or withdrawal of credit says, validated. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pilotlight.controller.billing.budget_definition import parse_amount
from pilotlight.errors import InvalidInput

MAX_NOTE_CHARS = 500
MAX_REFERENCE_CHARS = 200
LONGEST_S = 100 * 366 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantDefinition:
    """A grant: picounits of a currency, for calls that begin before `expires_at`; None = it does
    not expire. `reference`: the tenant's own id of it; None = none."""

    picos: int
    currency: str
    expires_at: float | None = None
    note: str = ""
    reference: str | None = None


def parse_grant(
    *,
    amount: str,
    currency: str,
    currencies: Collection[str],
    expires_at: float | None,
    note: str,
    reference: str | None,
    now: float,
) -> GrantDefinition:
    """Validate a grant. Raises InvalidInput with the key, the value and the limit."""
    if currency not in currencies:
        raise InvalidInput(
            f"currency = {currency!r}: there is no price list in this currency; use one of "
            f"{', '.join(sorted(currencies))}",
            parameter="currency",
        )
    if expires_at is not None and not now < expires_at < now + LONGEST_S:
        raise InvalidInput(
            f"expires_at = {expires_at}: must be in the future, and within 100 years",
            parameter="expires_at",
        )
    return GrantDefinition(
        picos=parse_amount(amount),
        currency=currency,
        expires_at=expires_at,
        note=note.strip(),
        reference=reference,
    )
