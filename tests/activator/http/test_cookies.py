"""Cookies of functions stay below their functions, whatever an application or an attacker says."""

from __future__ import annotations

import pytest

from activator.http.cookies import confine, without_ours

MOUNT = b"/t/acme/fn/shop/page"


@pytest.mark.parametrize(
    "said,sent",
    [
        (b"a=1", b"a=1; Path=/t/acme/fn/shop/page"),
        (b"a=1; Path=/", b"a=1; Path=/t/acme/fn/shop/page"),
        (b"a=1; path = /cart", b"a=1; Path=/t/acme/fn/shop/page/cart"),
        (b"a=1; Path=/t/acme/fn/shop/page", b"a=1; Path=/t/acme/fn/shop/page"),
        (b"a=1; Path=/t/acme/fn/shop/page/x", b"a=1; Path=/t/acme/fn/shop/page/x"),
        (
            b"a=1; Path=/t/acme/fn/shop/page2",
            b"a=1; Path=/t/acme/fn/shop/page/t/acme/fn/shop/page2",
        ),
        (b"a=1; Path=relative", b"a=1; Path=/t/acme/fn/shop/page"),
        (b"a=1; Path=/x; PATH=/", b"a=1; Path=/t/acme/fn/shop/page"),
        (
            b"a=1; HttpOnly; Domain=example.test; SameSite=Lax; dOmAiN=.test",
            b"a=1; HttpOnly; SameSite=Lax; Path=/t/acme/fn/shop/page",
        ),
        (b"path=/; Secure", b"path=/; Secure; Path=/t/acme/fn/shop/page"),
        (b"domain", b"domain; Path=/t/acme/fn/shop/page"),
        (b"", b"; Path=/t/acme/fn/shop/page"),
    ],
)
def test_a_cookie_is_sent_below_its_function_alone(said: bytes, sent: bytes) -> None:
    assert confine(said, MOUNT) == sent


@pytest.mark.parametrize(
    "said",
    [
        b"pilotlight_session=x",
        b"__Secure-pilotlight_session=x; Secure",
        b"=pilotlight_form=x",
        b"__Host-id=1; Secure; Path=/",
        b" __hOsT-id=1; Secure; Path=/",
        b"a=1\x00; Path=/",
        b"a=1\x0b",
    ],
)
def test_a_cookie_that_cannot_be_confined_is_not_sent(said: bytes) -> None:
    assert confine(said, MOUNT) is None


def test_the_dashboards_cookies_reach_no_function() -> None:
    assert without_ours(b"a=1;b=2") == b"a=1;b=2"
    assert without_ours(b"a=pilotlight_x; __Host-pilotlight_session=s;b=2") == (
        b"a=pilotlight_x; b=2"
    )
    assert without_ours(b"pilotlight_session=s") == b""
