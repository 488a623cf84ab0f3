"""Section `issuers` of platform.yaml: the issuers whose people sign in, and whose tokens call
functions.

Only the operator names issuers. A token is verified with keys that were fetched from its
configured issuer, never from an address that the token names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pilotlight.core.settings import SettingsInvalid, load_named_records, parse_item
from pilotlight.core.transport.listeners import is_loopback

CALLBACK_PATH = "/dashboard/login/callback"
"""Where an issuer sends browsers back to."""
MAX_ISSUERS = 16
MAX_RULES = 200
MAX_SESSION_S = 7 * 86_400
_SCALARS = (str, bool, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInRule:
    """What people with certain claims may do, once signed in.

    Attributes:
        claims: claims that a person's ID token must have: the value, or one of several; a claim
            that is a list must contain it. `email` counts only where `email_verified` is true.
        tenant: name of their tenant.
        scope: scope of their key.
        environment: the only environment that their key may access; None = all.
    """

    claims: Mapping[str, Any] = field(default_factory=dict)
    tenant: str = ""
    scope: str = ""
    environment: str | None = None

    def __post_init__(self) -> None:
        _check_claims(self.claims)
        _require_text(tenant=self.tenant, scope=self.scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerRule:
    """What functions the holders of certain tokens may call.

    Attributes:
        audience: what the token's `aud` must contain.
        claims: as of `SignInRule`.
        tenant: name of the tenant whose functions they call.
        environment: the only environment; None = all.
        app: the only app; None = all.
        function: its only function; None = all.
        customer_claim: the claim that names the customer for which all their calls are made; None =
            their calls are for no customer.
    """

    audience: str = ""
    claims: Mapping[str, Any] = field(default_factory=dict)
    tenant: str = ""
    environment: str | None = None
    app: str | None = None
    function: str | None = None
    customer_claim: str | None = None

    def __post_init__(self) -> None:
        _check_claims(self.claims)
        _require_text(audience=self.audience, tenant=self.tenant)
        if self.function is not None and self.app is None:
            raise ValueError(f"function = {self.function!r}: needs app, the app of the function")


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """An issuer.

    Attributes:
        name: its name here.
        issuer: its URL as its tokens name it (`iss`), where its discovery document lies; https, or
            http on this machine.
        client_id: the platform's client at this issuer, for people who sign in; None = no sign-in.
        client_secret_file: file with the client's secret, which only the controller reads; None = a
            public client.
        redirect_url: where the issuer sends browsers back to, as registered there; None =
            `/dashboard/login/callback` of controller.dashboard_url, else of activator.listen.
        scopes: what is requested of people.
        sign_in: what people may do: the first rule that fits a person counts; none = no sign-in.
        session_s: how long a sign-in lasts, to the dashboard and of `pilotlight login`.
        callers: which tokens call which functions: the first rule that fits a token counts.
        leeway_s: by how much the clocks of the issuer and of the platform may differ.
    """

    name: str = ""
    issuer: str = ""
    client_id: str | None = None
    client_secret_file: str | None = None
    redirect_url: str | None = None
    scopes: list[str] = field(default_factory=lambda: ["openid", "profile", "email"])
    sign_in: list[SignInRule] = field(default_factory=list)
    session_s: float = 43_200.0
    callers: list[CallerRule] = field(default_factory=list)
    leeway_s: float = 30.0

    def __post_init__(self) -> None:
        check_issuer_url(self.issuer)
        object.__setattr__(self, "sign_in", _rules(SignInRule, "sign_in", self.sign_in))
        object.__setattr__(self, "callers", _rules(CallerRule, "callers", self.callers))
        if self.sign_in and not self.client_id:
            raise ValueError("sign_in: needs client_id, the platform's client at this issuer")
        if any(rule.audience == self.client_id for rule in self.callers):
            raise ValueError(
                f"callers: audience {self.client_id!r} is client_id: ID tokens of people must not "
                f"call functions: register another audience at the issuer"
            )
        if "openid" not in self.scopes or not all(isinstance(one, str) for one in self.scopes):
            raise ValueError(f"scopes = {self.scopes!r}: must be texts, 'openid' among them")
        for name, least, most in (("session_s", 300, MAX_SESSION_S), ("leeway_s", 0, 300)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} = {getattr(self, name)}: must be from {least} to {most}")
        if self.redirect_url is not None:
            _check_redirect_url(self.redirect_url)

    @property
    def is_local(self) -> bool:
        """Whether it is reached without TLS, on this machine only."""
        return self.issuer.startswith("http:")


def read_issuers(file: Path | None) -> dict[str, Issuer]:
    """Read section `issuers` of platform.yaml. Raises SettingsInvalid."""
    found: dict[str, Issuer] = load_named_records(Issuer, "issuers", file, base={})
    if len(found) > MAX_ISSUERS:
        raise SettingsInvalid(f"{file}: issuers has {len(found)} entries: at most {MAX_ISSUERS}")
    urls = [one.issuer for one in found.values()]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise SettingsInvalid(f"{file}: issuers: two entries have issuer {twice!r}: merge them")
    return found


def check_issuer_url(url: str) -> None:
    """Raise ValueError unless this is the URL of an issuer."""
    if not _is_protected(url, is_http_allowed=True) or "?" in url or "#" in url:
        raise ValueError(
            f"issuer = {url!r}: write the issuer's https:// URL, without a query (http:// on this "
            f"machine only)"
        )


def is_endpoint(url: Any, *, of: Issuer) -> bool:
    """Whether a URL of an issuer's discovery document may be used: https, or http on this machine
    where the issuer itself is there."""
    return isinstance(url, str) and _is_protected(url, is_http_allowed=of.is_local)


def claim_of(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its name, or by a path of names such as `realm_access.roles`; None if there
    is none."""
    if name in claims:
        return claims[name]
    outer, _, inner = name.partition(".")
    found = claims.get(outer)
    return claim_of(found, inner) if inner and isinstance(found, Mapping) else None


def has_claims(claims: Mapping[str, Any], required: Mapping[str, Any]) -> bool:
    """Whether a token's claims are those that a rule requires. An `email` counts only where the
    issuer has verified it."""
    if "email" in required and claims.get("email_verified") is not True:
        return False
    return all(_has(claim_of(claims, name), wanted) for name, wanted in required.items())


def _has(found: Any, wanted: Any) -> bool:
    values = found if isinstance(found, list) else [found]
    accepted = wanted if isinstance(wanted, list) else [wanted]
    return any(type(one) is type(other) and one == other for one in values for other in accepted)


def _is_protected(url: str, *, is_http_allowed: bool) -> bool:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    if not host or parts.username is not None or parts.password is not None:
        return False
    is_here = parts.scheme == "http" and is_http_allowed and is_loopback(host)
    return parts.scheme == "https" or is_here


def _check_redirect_url(url: str) -> None:
    if not _is_protected(url, is_http_allowed=True) or not url.endswith(CALLBACK_PATH):
        raise ValueError(
            f"redirect_url = {url!r}: write https://host{CALLBACK_PATH} (http:// on this machine "
            f"only)"
        )


def _check_claims(claims: Mapping[str, Any]) -> None:
    if not claims:
        raise ValueError(
            "claims: name at least one: an issuer may have users whom you do not know (to accept "
            "all of them, name its URL: {iss: https://…})"
        )
    for name, value in claims.items():
        values = value if isinstance(value, list) else [value]
        if not isinstance(name, str) or not all(type(one) in _SCALARS for one in values):
            raise ValueError(f"claims.{name} = {value!r}: expected a text, a number, or a list")
        if not values:
            raise ValueError(f"claims.{name} = []: no token would fit")


def _require_text(**values: str) -> None:
    for name, value in values.items():
        if not value:
            raise ValueError(f"{name} is missing")


Rule = TypeVar("Rule", SignInRule, CallerRule)


def _rules(kind: type[Rule], where: str, values: Iterable[Any]) -> list[Rule]:
    rules = [
        one if isinstance(one, kind) else parse_item(kind, f"{where}[{number}]", one)
        for number, one in enumerate(values)
    ]
    if len(rules) > MAX_RULES:
        raise ValueError(f"{where} has {len(rules)} rules: at most {MAX_RULES}")
    return rules
