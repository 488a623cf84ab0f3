"""A controller with an issuer, and people at it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from pilotlight.controller.settings import ControllerSettings
from pilotlight.core.object_store import ObjectStore
from pilotlight.core.oidc.settings import CALLBACK_PATH, Issuer, SignInRule
from tests.fakes.issuer import CLIENT, SECRET, FakeIssuer
from tests.functions.controller.conftest import Controller, running_controller
from tests.functions.controller.parts import ManualClock

RULES = (
    SignInRule(claims={"groups": "ops"}, tenant="default", scope="admin"),
    SignInRule(claims={"email": "bill@example.com"}, tenant="acme", scope="read-billing"),
    SignInRule(claims={"groups": "acme"}, tenant="acme", scope="deploy", environment="main"),
    SignInRule(claims={"groups": "lost"}, tenant="nowhere", scope="deploy"),
    SignInRule(claims={"groups": "callers"}, tenant="default", scope="invoke"),
    SignInRule(claims={"groups": "ml"}, tenant="default", scope="deploy"),
)
BEGIN = "/dashboard/login/by/own"


@pytest.fixture(name="issuer")
def _issuer(clock: ManualClock) -> Iterator[FakeIssuer]:
    with FakeIssuer(clock).serve() as issuer:
        issuer.redirect_uris.add(f"http://controller{CALLBACK_PATH}")
        yield issuer


@pytest.fixture(name="settings")
def _settings() -> ControllerSettings:
    return ControllerSettings()


@pytest.fixture(name="controller")
async def _controller(
    *,
    clock: ManualClock,
    blobs: ObjectStore,
    tmp_path: Path,
    short_tmp: Path,
    issuer: FakeIssuer,
    settings: ControllerSettings,
) -> AsyncIterator[Controller]:
    own = Issuer(name="own", issuer=issuer.url, client_id=CLIENT, sign_in=list(RULES))
    async with running_controller(
        clock=clock,
        blobs=blobs,
        home=tmp_path,
        run=short_tmp,
        issuers={"own": own},
        secrets={"own": SECRET},
        settings=settings,
    ) as controller:
        await controller.other_tenant()
        yield controller


class Browser:
    """A browser of a person: keeps cookies by name, and goes where it is sent, to the controller and
    to issuers."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.cookies: dict[str, str] = {}
        self.headers = {"sec-fetch-site": "same-origin"}

    async def get(self, path: str) -> httpx.Response:
        """A page of the controller."""
        return self._keep(await self._client().get(path))

    async def post(self, path: str, **fields: str) -> httpx.Response:
        """A form."""
        return self._keep(await self._client().post(path, data=fields))

    async def begin(self) -> str:
        """Begin a sign-in; returns the issuer's page."""
        answer = await self.get(BEGIN)
        assert answer.status_code == 303, answer.text
        return answer.headers["location"]

    async def agree(self, page: str) -> str:
        """Agree at the issuer; returns where it sends the browser back to, without the origin."""
        async with httpx.AsyncClient() as client:
            answer = await client.get(page)
        assert answer.status_code == 302, answer.text
        parts = urlsplit(answer.headers["location"])
        assert f"{parts.scheme}://{parts.netloc}{parts.path}" == f"http://controller{CALLBACK_PATH}"
        return f"{parts.path}?{parts.query}"

    async def sign_in(self) -> httpx.Response:
        """All of it."""
        self.headers = {"sec-fetch-site": "same-origin"}
        back = await self.agree(await self.begin())
        self.headers = {"sec-fetch-site": "cross-site"}
        answer = await self.get(back)
        self.headers = {"sec-fetch-site": "same-origin"}
        return answer

    def _client(self) -> httpx.AsyncClient:
        client = self.controller.client(None)
        client.headers.update(self.headers)
        pairs = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        if pairs:
            client.headers["cookie"] = pairs
        return client

    def _keep(self, answer: httpx.Response) -> httpx.Response:
        for line in answer.headers.get_list("set-cookie"):
            name, _, value = line.partition(";")[0].partition("=")
            if value.strip('"'):
                self.cookies[name] = value
            else:
                self.cookies.pop(name, None)
        return answer


@pytest.fixture(name="browser")
def _browser(controller: Controller) -> Browser:
    return Browser(controller)


def error_of(page: httpx.Response) -> str:
    """What a page says is wrong."""
    (found,) = re.findall(r'role="alert">([^<]*)<', page.text)
    return str(found)


def query_of(url: str) -> dict[str, str]:
    """The parameters of an address."""
    return {key: values[-1] for key, values in parse_qs(urlsplit(url).query).items()}
