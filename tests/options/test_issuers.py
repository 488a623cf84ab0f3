"""Proofs of section `issuers`, which means the same on both fleets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import yaml

from activator.quotas.unauthenticated_limit import UnauthenticatedRateLimiter
from activator.routing.api_keys import TokenPrincipal
from activator.tokens.token_callers import TokenCallers
from pilotlight import errors
from pilotlight.controller.settings import ControllerConfig
from pilotlight.controller.sign_in import browser_sign_in
from pilotlight.controller.sign_in.browser_sign_in import Callback
from pilotlight.controller.sign_in.issuers import Identity, SignInIssuers
from pilotlight.core.oidc.issuer_client import IssuerClient
from pilotlight.core.oidc.settings import CALLBACK_PATH, read_issuers
from pilotlight.protocol import FeedChange
from tests.fakes.issuer import CLIENT, SECRET, FakeIssuer
from tests.fakes.routes import TENANT, empty_table
from tests.options.contract import CLUSTER, proves

BACK = f"http://127.0.0.1:9{CALLBACK_PATH}"


@pytest.fixture(name="issuer")
def _issuer() -> Iterator[FakeIssuer]:
    with FakeIssuer().serve() as issuer:
        issuer.redirect_uris.add(BACK)
        yield issuer


def written(directory: Path, fleet: str, issuer: FakeIssuer, **settings: Any) -> Path:
    """A platform.yaml with this issuer."""
    file = directory / "platform.yaml"
    platform = {"fleet": "knative"} if fleet == CLUSTER else {}
    own = {"issuer": issuer.url, **settings}
    file.write_text(yaml.safe_dump({"platform": platform, "issuers": {"own": own}}))
    return file


@proves(
    "Issuer.name",
    "Issuer.issuer",
    "Issuer.client_id",
    "Issuer.client_secret_file",
    "Issuer.redirect_url",
    "Issuer.scopes",
    "Issuer.session_s",
    "SignInRule.claims",
    "SignInRule.tenant",
    "SignInRule.scope",
    "SignInRule.environment",
)
async def test_people_sign_in_as_the_rules_say(
    fleet: str, issuer: FakeIssuer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    rules = [
        {"claims": {"groups": "other"}, "tenant": "other", "scope": "admin"},
        {"claims": {"groups": "ml"}, "tenant": "acme", "scope": "deploy", "environment": "main"},
    ]
    file = written(
        tmp_path,
        fleet,
        issuer,
        client_id=CLIENT,
        client_secret_file=str(secret),
        redirect_url=BACK,
        scopes=["openid", "groups"],
        session_s=900,
        sign_in=rules,
    )
    config = ControllerConfig.read(file)
    issuers = SignInIssuers(config.issuers, secrets=config.issuer_secrets)
    begun, page = await browser_sign_in.begin(
        issuers, "own", redirect_url=config.redirect_url("own"), now=0.0
    )
    query = parse_qs(urlsplit(page).query)
    assert (query["client_id"], query["scope"]) == ([CLIENT], ["openid groups"])
    async with httpx.AsyncClient() as browser:
        sent = (await browser.get(page)).headers["location"]
    assert sent.startswith(BACK)
    back = {name: values[0] for name, values in parse_qs(urlsplit(sent).query).items()}
    callback = Callback(state=back["state"], code=back["code"], issuer=back["iss"])
    found = await browser_sign_in.end(issuers, begun, callback, address="", now=0.0)
    await issuers.aclose()
    assert found == Identity(
        issuer="own",
        subject="u-alice",
        name="alice@example.com",
        tenant="acme",
        scope=found.scope,
        environment="main",
        lasts_s=900,
    )
    assert found.scope.value == "deploy"


@proves(
    "Issuer.leeway_s",
    "CallerRule.audience",
    "CallerRule.claims",
    "CallerRule.tenant",
    "CallerRule.environment",
    "CallerRule.app",
    "CallerRule.function",
    "CallerRule.customer_claim",
)
async def test_tokens_call_what_the_rules_say(
    fleet: str, issuer: FakeIssuer, tmp_path: Path
) -> None:
    rule = {
        "audience": "calls",
        "claims": {"groups": "ml"},
        "tenant": "acme",
        "environment": "staging",
        "app": "shop",
        "function": "hello",
        "customer_claim": "org",
    }
    file = written(tmp_path, fleet, issuer, leeway_s=5, callers=[rule])
    table = empty_table()
    record: dict[str, Any] = {
        "id": TENANT,
        "name": "acme",
        "uid": None,
        "plan": {},
        "suspended": False,
    }
    table.apply(FeedChange(seq=1, kind="tenant", key=TENANT, value=record))
    callers = TokenCallers(
        [IssuerClient(read_issuers(file)["own"])],
        table=table,
        unauthenticated=UnauthenticatedRateLimiter(rate_per_s=100),
    )

    async def caller_of(**claims: Any) -> TokenPrincipal:
        header = f"Bearer {issuer.token(**{'org': 'ana', **claims})}".encode()
        await callers.verify(header, "192.0.2.1")
        found = callers.cached_caller(header)
        assert found is not None
        return found

    found = await caller_of()
    assert (found.tenant, found.environment, found.app, found.function, found.customer) == (
        TENANT,
        "staging",
        "shop",
        "hello",
        "ana",
    )
    now = int(issuer.clock())
    await caller_of(nbf=now + 4)
    for claims in ({"aud": "x"}, {"groups": "x"}, {"org": None}, {"nbf": now + 9}):
        with pytest.raises(errors.Unauthenticated):
            await caller_of(**claims)
    await callers.aclose()
