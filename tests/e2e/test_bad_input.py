"""Bad input, over real HTTP and with the real SDK: every refusal names what was wrong, and starts
nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import httpx
import pytest

from pilotlight.client import sessions
from pilotlight.errors import NotFound, Unauthenticated
from pilotlight.profile import Profile
from pilotlight.protocol import PROBLEM_BASE
from pilotlight.sdk.function import Function
from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def _deployed(platform: PlatformUnderTest) -> None:
    platform.deploy("faulty.py")


@pytest.fixture
def key_of_another_tenant(platform: PlatformUnderTest) -> str:
    answer = httpx.get(f"{platform.url}/v1/tenants", headers=platform.headers, timeout=60)
    name = f"rival{len(answer.json()['tenants'])}"
    made = httpx.post(
        f"{platform.url}/v1/tenants", json={"name": name}, headers=platform.headers, timeout=60
    )
    assert made.status_code == 201, made.text
    return str(made.json()["key"]["secret"])


def problem(answer: httpx.Response, status: int, kind: str) -> dict[str, object]:
    """The problem document, after checking its form (RFC 9457)."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, object] = answer.json()
    assert body["type"] == PROBLEM_BASE + kind
    assert body["status"] == status
    assert body["instance"] == answer.headers["x-request-id"]
    return body


# -- the body --------------------------------------------------------------------------------------
def test_a_body_that_is_not_json_is_refused_and_says_where_it_breaks(
    platform: PlatformUnderTest,
) -> None:
    body = problem(platform.post("faulty/area", content=b'{"width": 3'), 400, "invalid-input")
    assert "JSON" in str(body["detail"])


def test_a_body_that_is_neither_object_nor_array_is_refused(platform: PlatformUnderTest) -> None:
    problem(platform.post("faulty/area", content=b'"three"'), 400, "invalid-input")


@pytest.mark.parametrize(
    "arguments, parameter",
    [
        ({"widht": 3}, "widht"),
        ({}, "width"),
        ({"width": "three"}, "width"),
        ({"width": 3, "height": None}, "height"),
        ({"width": 3, "depth": 1}, "depth"),
    ],
)
def test_wrong_arguments_are_refused_by_the_name_of_their_parameter(
    platform: PlatformUnderTest, arguments: dict[str, object], parameter: str
) -> None:
    body = problem(platform.post("faulty/area", arguments), 400, "invalid-input")
    assert parameter in str(body["detail"])
    # with a name missing and another unknown, either may be told
    assert body["parameter"] in (parameter, "width")


def test_refused_arguments_start_nothing_and_cost_nothing(platform: PlatformUnderTest) -> None:
    refused = platform.post("faulty/describe", {"data": 1})
    problem(refused, 400, "invalid-input")
    assert platform.instances("faulty", "describe") == []
    assert platform.usage("call = ?", refused.headers["x-request-id"]) == []


def test_a_body_over_the_limit_is_refused_before_it_is_read(platform: PlatformUnderTest) -> None:
    limit = 10 * 1024 * 1024
    body = problem(platform.post("faulty/area", content=b" " * (limit + 1)), 413, "too-large")
    assert body["limit_bytes"] == limit


def test_a_body_over_the_limit_of_undeclared_length_is_refused(platform: PlatformUnderTest) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(11):
            yield b" " * 1024 * 1024

    try:
        answer = platform.post("faulty/area", content=pieces())
    except httpx.TransportError:
        return  # the answer was overtaken by the closed connection: refused all the same
    problem(answer, 413, "too-large")


def test_base64_and_objects_arrive_as_the_bytes_and_dataclasses_that_were_declared(
    platform: PlatformUnderTest,
) -> None:
    data = base64.b64encode(b"\x00\xff\x10").decode()
    assert (
        platform.result("faulty/describe", {"data": data, "corner": {"x": 3}})
        == "bytes 3 Point 3,0"
    )


def test_text_that_is_not_base64_is_refused_for_a_parameter_of_bytes(
    platform: PlatformUnderTest,
) -> None:
    answer = platform.post("faulty/describe", {"data": "not base64!", "corner": {"x": 3}})
    assert problem(answer, 400, "invalid-input")["parameter"] == "data"


# -- who asks for what -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "address", ["faulty/missing", "missing/area", "faulty/area.method", "faulty", "faulty/"]
)
def test_an_unknown_function_is_not_found(platform: PlatformUnderTest, address: str) -> None:
    problem(platform.post(address), 404, "not-found")


def test_an_unknown_function_is_not_found_by_the_sdk(platform: PlatformUnderTest) -> None:
    with sessions.use_profile(platform.profile), pytest.raises(NotFound, match="pilotlight deploy"):
        Function.from_name("faulty", "missing").remote()


def test_without_a_key_and_with_a_wrong_one_nobody_gets_in(platform: PlatformUnderTest) -> None:
    problem(platform.post("faulty/area", headers={}), 401, "unauthenticated")
    problem(
        platform.post("faulty/area", headers={"authorization": "Bearer pl_guessed"}),
        401,
        "unauthenticated",
    )
    problem(
        platform.post("faulty/area", headers={"authorization": "Basic YTpi"}),
        401,
        "unauthenticated",
    )
    with (
        sessions.use_profile(Profile(url=platform.url, api_key="pl_guessed")),
        pytest.raises(Unauthenticated),
    ):
        Function.from_name("faulty", "area").remote(3)


def test_a_revoked_key_is_refused_at_once(platform: PlatformUnderTest) -> None:
    with platform.client() as client:
        made = client.create_key(scope="invoke", name="short-lived")
        headers = {"authorization": f"Bearer {made['secret']}"}
        wait_for(
            lambda: platform.post("faulty/area", {"width": 2}, headers=headers).status_code == 200,
            "the new key to be known",
        )
        client.revoke_key(made["id"])
    assert platform.post("faulty/area", {"width": 2}, headers=headers).status_code == 401


def test_an_invoke_key_does_not_reach_the_control_plane(platform: PlatformUnderTest) -> None:
    with platform.client() as client:
        made = client.create_key(scope="invoke", name="caller")
    headers = {"authorization": f"Bearer {made['secret']}"}
    answer = httpx.delete(f"{platform.url}/v1/apps/faulty", headers=headers, timeout=60)
    assert answer.status_code == 403, answer.text


@pytest.mark.root
def test_another_tenants_function_does_not_exist(
    platform: PlatformUnderTest, key_of_another_tenant: str
) -> None:
    headers = {"authorization": f"Bearer {key_of_another_tenant}"}

    def known() -> httpx.Response | None:
        answer = platform.post("faulty/area", {"width": 2}, headers=headers)
        return answer if answer.status_code != 401 else None

    foreign = wait_for(known, "the new tenant's key to be known")
    unknown = platform.post("faulty/nowhere", {"width": 2}, headers=headers)
    assert problem(foreign, 404, "not-found")["detail"] == str(
        problem(unknown, 404, "not-found")["detail"]
    ).replace("nowhere", "area")
    submitted = platform.post("faulty/area", {"width": 2}, verb="submit")
    seen = httpx.get(
        f"{platform.url}/v1/calls/{submitted.json()['id']}", headers=headers, timeout=60
    )
    problem(seen, 404, "not-found")
