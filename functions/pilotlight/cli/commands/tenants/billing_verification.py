"""`pilotlight billing verify`: compare records, their archives, sums and invoices."""

from __future__ import annotations

from typing import Annotated

import typer

from pilotlight.cli.core.session import Session
from pilotlight.errors import PilotlightError


def verify(
    session: Session,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild",
            help="First rebuild the sums from the usage records; platform administrators only.",
        ),
    ] = False,
) -> None:
    """Verify that the sums behind reports match the usage records, and issued invoices these sums.

    For platform administrators, of all tenants, and with the chain of archived records in the blob
    store.
    """
    with session.client() as client:
        if rebuild:
            client.rebuild_rollups()
        body = client.verify_ledger()
        checks = [client.verify_archive(n + 1) for n in range(body["archives"] or 0)]
    if wrong := [one for one in checks if one["problem"]]:
        raise PilotlightError(
            f"{len(wrong)} of {len(checks)} archives of usage records are not as written: "
            f"{wrong[0]['problem']}",
            hint="Restore their files (usage-archives/ in the blob store) from a backup.",
            archives=wrong,
        )
    if body["invoices"]:
        first = body["invoices"][0]
        raise PilotlightError(
            f"{len(body['invoices'])} invoices differ from their records; the first is "
            f"{first['id']} of {first['month']}: {first['found']} instead of {first['expected']} "
            f"{first['currency']}",
            invoices=body["invoices"],
        )
    if body["differences"]:
        first = body["differences"][0]
        raise PilotlightError(
            f"{len(body['differences'])} sums differ from their records; the first is "
            f"{first['table']} of {first['month']}: {first['found'][1]} instead of "
            f"{first['expected'][1]} {first['currency']}",
            hint="Rebuild them with `pilotlight billing verify --rebuild`.",
            differences=body["differences"],
        )
    archived = sum(one["records"] for one in checks)
    of_them = (
        f", {archived} of them in {len(checks)} archives whose chain is whole" if checks else ""
    )
    session.show(body, lambda: f"{body['records']} records{of_them}; all sums match")
