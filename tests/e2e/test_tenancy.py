"""A tenant's life on a whole platform, from the operator's command line to the edge: made, bounded,
shared, rotated, suspended."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from pilotlight import Function, profile
from pilotlight.client import sessions
from pilotlight.client.client import Client
from pilotlight.errors import NotFound
from pilotlight.profile import Profile
from pilotlight.protocol import CONTENT_PICKLE
from tests.e2e.harness import APPS, PlatformUnderTest, wait_for
from tests.fakes.plain_http import NO_TLS

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Another tenant of the platform, with app `shared` deployed."""

    platform: PlatformUnderTest
    name: str
    key: str

    def cli(self, *words: str) -> Any:
        """Run `pilotlight WORDS --json` with this tenant's key."""
        file = self.platform.local.paths.home.parent / f"{self.name}.toml"
        profile.save(Profile(url=self.platform.url, api_key=self.key), path=file)
        done = self.platform.cli(*words, "--json", "--profile-file", str(file))
        return json.loads(done.stdout) if done.stdout.strip() else None

    def client(self, key: str | None = None) -> Client:
        """A client with its admin key, or another; the caller closes it."""
        return Client(Profile(url=self.platform.url, api_key=key or self.key))

    def call(self, function: str, key: str | None = None, *, prefix: str = "") -> httpx.Response:
        """Call `shared/<function>` with its admin key, or another; "" = with none."""
        token = self.key if key is None else key
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.post(
            f"{self.platform.url}{prefix}/v1/functions/shared/{function}:invoke",
            json={"n": 7},
            headers=headers,
            timeout=60,
            verify=NO_TLS,
        )


@pytest.fixture(scope="module")
def acme(platform: PlatformUnderTest) -> Iterator[Tenant]:
    made = json.loads(
        platform.cli(
            "tenant",
            "create",
            "acme",
            "--plan",
            "free",
            "--override",
            "requests_per_s=1000",
            "--json",
        ).stdout
    )
    tenant = Tenant(platform=platform, name="acme", key=made["key"]["secret"])
    wait_for(lambda: tenant.call("own").status_code == 404, "the activator to know the key")
    tenant.cli("deploy", str(APPS / "shared.py"), "--no-wait")
    yield tenant
    tenant.cli("app", "delete", "shared", "--yes")


def status_of(call: Callable[[], httpx.Response], wanted: int) -> httpx.Response:
    """The answer once it has this status: a change reaches the edge within moments."""
    return wait_for(
        lambda: answer if (answer := call()).status_code == wanted else None, f"an answer {wanted}"
    )


def test_a_tenant_calls_its_own_lends_one_and_publishes_another(acme: Tenant) -> None:
    operator = acme.platform.profile.api_key or ""
    assert acme.call("own").json() == 7
    assert acme.call("own", operator).status_code == 404, (
        "without the tenant's name it is the caller's own app"
    )
    assert acme.call("own", operator, prefix="/t/acme").status_code == 404, (
        "nobody is told that it exists"
    )
    assert acme.call("lent", operator, prefix="/t/acme").json() == 7
    assert acme.call("lent", "", prefix="/t/acme").status_code in (401, 404)
    assert acme.call("public", "", prefix="/t/acme").json() == 7


class Computed:
    """Its pickle is an expression, which gives 7 where the pickle is opened."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("3 + 4",)


def test_a_pickle_is_opened_for_the_functions_own_tenant_only(acme: Tenant) -> None:
    operator = acme.platform.profile.api_key or ""
    body = pickle.dumps(((), {"n": Computed()}))

    def send(function: str, key: str, verb: str = "invoke") -> httpx.Response:
        headers = {
            "content-type": CONTENT_PICKLE,
            **({"authorization": f"Bearer {key}"} if key else {}),
        }
        url = f"{acme.platform.url}/t/acme/v1/functions/shared/{function}:{verb}"
        return httpx.post(url, content=body, headers=headers, timeout=60, verify=NO_TLS)

    assert pickle.loads(send("public", acme.key).content) == 7
    for _ in range(3):  # whether its instance is cold or warm
        assert (
            send("public", "").status_code
            == send("public", operator).status_code
            == send("lent", operator).status_code
            == 415
        )
        assert acme.call("public", operator, prefix="/t/acme").json() == 7
    assert send("lent", operator, "submit").status_code == 415
    assert pickle.loads(send("lent", acme.key).content) == 7


def test_a_key_of_one_function_calls_that_one(acme: Tenant) -> None:
    key = acme.cli("token", "create", "--function", "shared/own")["secret"]
    assert status_of(lambda: acme.call("own", key), 200).json() == 7
    assert acme.call("lent", key).status_code == 403


def test_a_rotated_key_ends_everywhere_at_once_and_with_grace_later(acme: Tenant) -> None:
    old = acme.cli("token", "create")
    status_of(lambda: acme.call("own", old["secret"]), 200)
    new = acme.cli("token", "rotate", old["id"], "--grace", "1h")
    status_of(lambda: acme.call("own", new["secret"]), 200)
    assert acme.call("own", old["secret"]).status_code == 200
    last = acme.cli("token", "rotate", new["id"], "--yes")
    status_of(lambda: acme.call("own", new["secret"]), 401)
    status_of(lambda: acme.call("own", last["secret"]), 200)


def test_a_quota_of_a_key_is_kept_at_the_edge_and_says_when_to_come_again(acme: Tenant) -> None:
    key = acme.cli("token", "create", "--quota", "requests_per_s=0.01", "--quota", "burst=2")
    status_of(lambda: acme.call("own", key["secret"]), 200)
    over = status_of(lambda: acme.call("own", key["secret"]), 429)
    assert 1 <= int(over.headers["retry-after"]) <= 100
    assert {"ratelimit", "ratelimit-policy"} <= over.headers.keys()
    acme.cli("quota", "clear", "--key", key["id"])
    status_of(lambda: acme.call("own", key["secret"]), 200)


def test_a_suspended_tenant_is_refused_at_the_edge_and_goes_on_after(acme: Tenant) -> None:
    acme.platform.cli("tenant", "suspend", "acme", "--yes")
    for function, key in (("own", acme.key), ("public", "")):
        status_of(
            lambda function=function, key=key: acme.call(function, key, prefix="/t/acme"),  # type: ignore[misc]
            403,
        )
    with acme.client() as client:
        assert client.own_tenant()["suspended"] is True
    acme.platform.cli("tenant", "resume", "acme")
    status_of(lambda: acme.call("own"), 200)


def test_the_log_says_from_where_whatever_the_caller_says(acme: Tenant) -> None:
    headers = {"authorization": f"Bearer {acme.key}", "x-forwarded-for": "198.51.100.9"}
    assert (
        httpx.post(f"{acme.platform.url}/v1/keys", json={}, headers=headers, timeout=60).status_code
        == 201
    )
    assert acme.cli("audit", "--limit", "1")[0]["address"] == "127.0.0.1"
    actions = {
        entry["action"]
        for entry in json.loads(acme.platform.cli("audit", "--tenant", "acme", "--json").stdout)
    }
    assert {"tenant.create", "app.deploy", "key.create", "key.rotate", "tenant.change"} <= actions


def test_the_sdk_calls_what_another_tenant_lends_and_says_whose_is_missing(acme: Tenant) -> None:
    with sessions.use_profile(acme.platform.profile):
        lent = Function.from_name("shared", "lent", tenant="acme")
        assert lent.remote(7) == 7
        assert lent.with_options(priority="batch").remote(8) == 8
        assert sorted(lent.map([1, 2, 3])) == [1, 2, 3]
        assert lent.spawn(9).get(timeout=60) == 9
        with pytest.raises(NotFound, match="tenant 'acme' has no shared/own, or does not share it"):
            Function.from_name("shared", "own", tenant="acme").remote(7)
    sessions.close()
