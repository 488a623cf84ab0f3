"""`pilotlight login --oidc`: sign in by an issuer of the platform in a browser of any machine (the
device flow, RFC 8628).

The platform asks the issuer; this machine gets an API key of the person, which ends after some
hours, and neither a token of the issuer nor a password."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pilotlight.cli.core.saved_profiles import saved_profile
from pilotlight.cli.core.session import RETRY_BUDGET_S, Session
from pilotlight.errors import Unauthenticated, Unavailable

if TYPE_CHECKING:
    from pilotlight.client.client import Client
    from pilotlight.profile import Profile

_SLOWEST_S = 60.0
_QUICKEST_S = 0.2


def sign_in(session: Session, address: str, issuer: str | None) -> dict[str, Any]:
    """Show where to sign in, wait until the person has, and return the answer with the key. Raises
    Unauthenticated, Forbidden, NotFound, Unavailable; KeyboardInterrupt leaves nothing."""
    from pilotlight.client.client import Client
    from pilotlight.profile import Profile

    with Client(Profile(url=address), retry_budget_s=RETRY_BUDGET_S) as client:
        begun = client.begin_sign_in(issuer)
        _show(session, begun)
        return _wait(client, begun)


def is_sign_in(wanted: Profile) -> bool:
    """Whether the key of a profile was made for a sign-in, or is not valid any longer, so that
    nothing is lost with it."""
    from pilotlight.client.client import Client

    if not wanted.api_key:
        return True
    try:
        with Client(wanted, retry_budget_s=RETRY_BUDGET_S) as client:
            return client.whoami()["issuer"] is not None
    except Unauthenticated:
        return True


def drop_sign_in(session: Session, name: str, address: str) -> None:
    """Forget the key of a profile if it was made for a sign-in to the same platform, so that it is
    replaced and not kept under another name."""
    from dataclasses import replace

    from pilotlight import profile

    held = saved_profile(session, name)
    if held is not None and held.api_key and held.url == address and is_sign_in(held):
        file = profile.config_path(session.profile_environ())
        profile.save(replace(held, api_key=""), name=name, path=file, activate=False)


def describe_expiry(expires_at: float) -> str:
    """When a sign-in ends, in the local time of this machine."""
    return datetime.fromtimestamp(expires_at).astimezone().strftime("%Y-%m-%d %H:%M")


def _show(session: Session, begun: dict[str, Any]) -> None:
    """Show the page and the code. With --json they are a line of their own, before the result."""
    names = ("issuer", "user_code", "verification_uri", "verification_uri_complete", "expires_at")
    if session.is_json:
        session.show({name: begun[name] for name in names}, lambda: "")
        return
    session.say(f"open {begun['verification_uri']} in a browser and type {begun['user_code']}")
    if begun["verification_uri_complete"]:
        session.say(f"or open {begun['verification_uri_complete']} and compare the code")


def _wait(client: Client, begun: dict[str, Any]) -> dict[str, Any]:
    interval_s = float(begun["interval_s"])
    until = time.monotonic() + max(0.0, float(begun["expires_at"]) - time.time())
    while True:
        time.sleep(min(max(interval_s, _QUICKEST_S), _SLOWEST_S))
        try:
            answer = client.redeem_sign_in(begun["code"])
        except Unavailable:
            if time.monotonic() >= until:
                raise
            continue  # the issuer, or the platform, is away for a moment
        if answer["status"] == "signed_in":
            return answer
        interval_s = float(answer["interval_s"])
