"""Signing in to the dashboard with an issuer of another site, in real Chromium: its cookies, and
what it sends after redirects between sites, are what matters here."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from pilotlight.controller.identity import sessions
from pilotlight.core.oidc.settings import CALLBACK_PATH, Issuer, SignInRule
from tests.conftest import RequireOrSkip
from tests.fakes.issuer import CLIENT, SECRET, FakeIssuer
from tests.fakes.served_controller import CLOCK_S, ServedController

CHROMIUM = Path("/usr/bin/chromium")
ML = SignInRule(claims={"groups": "ml"}, tenant="default", scope="deploy")


@pytest.mark.slow  # drives a real browser
@pytest.mark.parametrize("has_scripts", [True, False])
async def test_a_person_signs_in_and_out(
    tmp_path: Path, require_or_skip: RequireOrSkip, has_scripts: bool
) -> None:
    if not CHROMIUM.exists():
        require_or_skip("Chromium is not installed (scripts/install-system-packages test)")
    issuers: dict[str, Issuer] = {}
    served = ServedController(tmp_path, issuers=issuers, secrets={"own": SECRET})
    # another site than the issuer's 127.0.0.1
    origin = served.url.replace("127.0.0.1", "localhost")
    with FakeIssuer(lambda: CLOCK_S).serve() as issuer:
        issuer.redirect_uris.add(f"{origin}{CALLBACK_PATH}")
        issuers["own"] = Issuer(
            name="own",
            issuer=issuer.url,
            client_id=CLIENT,
            redirect_url=f"{origin}{CALLBACK_PATH}",
            sign_in=[ML],
        )
        with served:
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(
                    executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
                )
                context = await browser.new_context(java_script_enabled=has_scripts)
                page = await context.new_page()
                await page.goto(f"{origin}/dashboard/login")
                await page.get_by_role("link", name="Sign in with own").click()
                await page.wait_for_url(f"{origin}/dashboard")
                cookies = {cookie["name"]: cookie for cookie in await context.cookies()}
                assert set(cookies) == {sessions.COOKIE, sessions.FORM_COOKIE}
                assert {cookie["sameSite"] for cookie in cookies.values()} == {"Strict"}
                await page.get_by_role("button", name="Sign out").click()
                await page.wait_for_url(f"{origin}/dashboard/login")
                await browser.close()
