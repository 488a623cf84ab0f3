"""The dashboard in real Chromium: clicked through, with and without scripts, dark and light, on a
desk and on a phone."""

from __future__ import annotations

import contextlib
import csv
import io
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect
from playwright.async_api import TimeoutError as PlaywrightTimeoutError

from pilotlight.controller.billing import invoices
from pilotlight.controller.dashboard.navigation import SECTIONS
from tests.conftest import RequireOrSkip
from tests.fakes.demo_platform import FAILED_CALL, Demo, demo, furnish
from tests.functions.controller.parts import ManualClock, usage

CHROMIUM = Path("/usr/bin/chromium")
NOW = 1_800_018_000.0
"""15 January 2027, 13:00 UTC: a busy hour in the middle of a month."""
PAGES = (
    "/dashboard",
    "/dashboard/usage",
    "/dashboard/apps",
    "/dashboard/apps/search",
    "/dashboard/invoke?function=search/embed",
    "/dashboard/functions/search/embed",
    "/dashboard/calls",
    "/dashboard/calls?status=5xx&since=2027-01-15T00:00",
    f"/dashboard/calls/{FAILED_CALL}",
    "/dashboard/logs",
    "/dashboard/traces",
    "/dashboard/traces/req-0000000000000000000000000000000b",
    "/dashboard/releases",
    "/dashboard/experiments",
    "/dashboard/objectives",
    "/dashboard/drift",
    "/dashboard/objectives/search/embed",
    "/dashboard/budgets",
    "/dashboard/invoices",
    "/dashboard/access",
    "/dashboard/platform",
    "/dashboard/platform/instances",
    "/dashboard/platform/storage",
)
PATIENCE_MS = 30_000
# drives a real browser
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180), pytest.mark.slow]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pl") as name:
        yield Path(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shown(directory: Path) -> AsyncIterator[Demo]:
    """A platform with a month behind it; tests add to it, and take nothing away."""
    home, run = directory / "home", directory / "run"
    home.mkdir()
    run.mkdir()
    async with demo(home, run, clock=ManualClock(NOW)) as made:
        await furnish(made, now=NOW)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(require_or_skip: RequireOrSkip) -> AsyncIterator[Browser]:
    if not CHROMIUM.exists():
        require_or_skip("Chromium is not installed (scripts/install-system-packages test)")
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield launched
        await launched.close()


@dataclass
class Complaints:
    """What the browser had to say against the pages that it showed."""

    found: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


@asynccontextmanager
async def opened(
    browser: Browser,
    made: Demo,
    *,
    key: str = "",
    complaints: Complaints | None = None,
    **options: Any,
) -> AsyncIterator[Page]:
    """A page of a fresh browser profile, signed in."""
    options.setdefault("viewport", {"width": 1280, "height": 800})
    context = await browser.new_context(base_url=made.url, reduced_motion="reduce", **options)
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    if complaints is not None:
        page.on(
            "console",
            lambda m: complaints.found.append(m.text) if m.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda e: complaints.found.append(str(e)))
        page.on(
            "request",
            lambda r: (
                complaints.elsewhere.append(r.url) if not r.url.startswith(made.url) else None
            ),
        )
    try:
        await sign_in(page, key or made.keys["admin"])
        yield page
    finally:
        await context.close()


async def sign_in(page: Page, key: str) -> None:
    await page.goto("/dashboard")
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Overview")


async def drawn(page: Page) -> None:
    """Until every chart is there."""
    await page.wait_for_load_state()  # before, not all places of charts may be known
    await expect(page.locator(".plot:not(:has(.main-svg))")).to_have_count(0)


async def click_in_log(page: Page, call: str) -> None:
    """Click a call's link, again where the log's first event replaced the row between the press of
    the button and its release."""
    link = page.get_by_title(call).first
    while call not in page.url:
        await link.click()
        with contextlib.suppress(PlaywrightTimeoutError):
            await page.wait_for_url(f"**/calls/{call}*", timeout=5000)


async def test_every_page_is_reached_by_clicking_and_nothing_is_blocked_or_loaded_from_elsewhere(
    browser: Browser, shown: Demo
) -> None:
    complaints = Complaints()
    async with opened(browser, shown, complaints=complaints) as page:
        await drawn(page)
        assert await page.locator(".plot .main-svg").count() >= 2
        navigation = page.get_by_role("navigation")
        for section in SECTIONS:
            await navigation.get_by_role("link", name=section.text, exact=True).first.click()
            for tab in section.pages:
                pages = page.get_by_role("navigation").last
                await pages.get_by_role("link", name=tab.text, exact=True).click()
                await expect(page.locator("nav a[aria-current=page]")).to_have_text(tab.text)
        await page.get_by_role("link", name="Overview", exact=True).click()
        await (
            page.locator("section[aria-labelledby=functions]")
            .get_by_role("link", name="search/embed")
            .click()
        )
        await expect(page.get_by_role("heading", level=1)).to_have_text("search/embed")
        await drawn(page)
        await page.get_by_role("link", name="30 d").click()
        await expect(page.get_by_role("link", name="30 d")).to_have_attribute(
            "aria-current", "true"
        )
        await page.get_by_role("link", name="All calls").click()
        await page.get_by_role("link", name="Older calls").click()
        await page.locator("tbody a.mono, tbody td.mono a").first.click()
        await expect(page.get_by_role("heading", name="Attempt 1")).to_be_visible()
        await navigation.get_by_role("link", name="Logs").click()
        await expect(page.locator(".live.on")).to_be_visible()
        await expect(page.locator("[data-log] tr")).to_have_count(len(shown.agent.lines))
        await click_in_log(page, FAILED_CALL)
        await expect(page.get_by_role("region", name="Traceback")).to_contain_text("line 31")
        await page.goto("/dashboard/apps/search")
        # the dashboard has no origin of its own here
        await expect(page.locator("code.curl").first).to_contain_text(f'"{shown.url}/v1/functions/')
        await page.get_by_role("link", name="Call it").first.click()
        await page.get_by_label("Arguments as JSON").fill('{"text": "hi"}')
        await page.get_by_role("button", name="Call", exact=True).click()
        await expect(page.get_by_role("status")).to_contain_text("Queued")
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    assert complaints.found == []
    assert complaints.elsewhere == []


async def test_without_scripts_every_number_is_there_as_text(browser: Browser, shown: Demo) -> None:
    async with opened(browser, shown, java_script_enabled=False) as page:
        region = page.get_by_role("region", name="Spend by function, as a table")
        await expect(region).to_be_visible()
        await expect(region.get_by_role("columnheader", name="chat/Assistant")).to_be_visible()
        assert await page.locator(".plot:visible").count() == 0
        for path in PAGES:
            answer = await page.goto(path)
            assert answer is not None
            assert answer.status == 200, path


async def test_a_code_in_the_fragment_signs_in_once_and_leaves_the_address(
    browser: Browser, shown: Demo
) -> None:
    admin = {"authorization": f"Bearer {shown.keys['admin']}"}
    async with httpx.AsyncClient(base_url=shown.url, headers=admin) as http:
        code = (await http.post("/v1/sign-in-codes")).json()["code"]
    for heading in ("Overview", "Sign in"):  # the second profile comes too late
        context = await browser.new_context(base_url=shown.url)
        page = await context.new_page()
        await page.goto(f"/dashboard/login#code={code}")
        await expect(page.get_by_role("heading", level=1)).to_have_text(heading)
        assert code not in page.url
        if heading == "Sign in":
            await expect(page.get_by_role("alert")).to_contain_text("was used or has expired")
        await context.close()


async def test_a_trace_is_found_by_its_reason_and_opened(browser: Browser, shown: Demo) -> None:
    async with opened(browser, shown) as page:
        await page.goto("/dashboard/traces")
        await page.get_by_label("Reason").select_option("waited for a start")
        await expect(page.locator("tbody tr").first).to_contain_text("waited for a start")
        await page.locator("tbody tr").first.get_by_role("link").click()
        await expect(page.get_by_role("rowheader", name="tokenise")).to_be_visible()
        await expect(page.locator("svg.fall")).to_have_count(13)
        await page.get_by_text("1 attribute").first.click()
        await expect(page.locator("details[open] dl").first).to_be_visible()


async def test_a_chart_that_cannot_be_drawn_leaves_its_table_open(
    browser: Browser, shown: Demo
) -> None:
    async with opened(browser, shown) as page:
        await page.context.route("**/plotly.js", lambda route: route.abort())
        await page.reload()
        await expect(page.get_by_role("region", name="Requests, as a table")).to_be_visible()
        await expect(page.locator(".plot")).to_have_count(0)


async def test_what_happens_shows_without_a_reload(browser: Browser, shown: Demo) -> None:
    async with opened(browser, shown) as page:
        await expect(page.locator(".live.on")).to_be_visible()
        before = await page.locator("[data-live-figure=hour-calls]").inner_text()
        name = "search/rank"
        one = usage(
            "req-live/1",
            tenant=shown.tenant,
            app="search",
            function="rank",
            function_id=shown.ids[name],
            started_at=NOW + 1,
            exec_ms=4321,
        )
        shown.add([one.to_json()])
        await expect(page.locator("[data-live-rows] tr").first).to_contain_text("4.32 s")
        await expect(page.locator("[data-live-figure=hour-calls]")).not_to_have_text(before)


async def test_a_revoked_key_ends_the_page_that_is_open(browser: Browser, shown: Demo) -> None:
    made = (await shown.http.post("/v1/keys", json={"scope": "deploy"})).json()
    async with opened(browser, shown, key=made["secret"]) as page:
        await expect(page.locator(".live.on")).to_be_visible()
        assert (await shown.http.delete(f"/v1/keys/{made['id']}")).status_code == 204
        await page.wait_for_url("**/dashboard/login")


async def test_signing_out_ends_every_tab_and_a_kept_cookie_is_worth_nothing(
    browser: Browser, shown: Demo
) -> None:
    async with opened(browser, shown) as page:
        other = await page.context.new_page()
        await other.goto("/dashboard")
        await expect(other.locator(".live.on")).to_be_visible()
        kept = await page.context.cookies()
        await page.get_by_role("button", name="Sign out").click()
        await other.wait_for_url("**/dashboard/login")
        # the answer that takes the cookie away is here
        await expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        await page.context.add_cookies([c for c in kept if c["name"] == "pilotlight_session"])  # type: ignore[misc]
        await page.goto("/dashboard")
        assert page.url.endswith("/dashboard/login")


async def test_no_page_is_wider_than_a_phone(browser: Browser, shown: Demo) -> None:
    async with opened(
        browser, shown, viewport={"width": 390, "height": 844}, has_touch=True
    ) as page:
        for path in PAGES:
            await page.goto(path)
            await drawn(page)
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390, path
            assert await page.evaluate(
                "[...document.querySelectorAll('main > *')].every(e => "
                "e.getBoundingClientRect().right <= 391)"
            ), path
            # no table is cut off: rows are blocks there (wide waterfalls of traces still scroll)
            assert await page.evaluate(
                "[...document.querySelectorAll('.scroll:not(:has(.spans))')].every(e => "
                "e.scrollWidth <= e.clientWidth + 1)"
            ), path


async def test_the_keyboard_reaches_everything_and_its_place_is_seen(
    browser: Browser, shown: Demo
) -> None:
    async with opened(browser, shown) as page:
        await page.goto("/dashboard/calls")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to the content"
        seen = set()
        for _ in range(18):
            await page.keyboard.press("Tab")
            seen.add(
                await page.evaluate("document.activeElement.textContent.trim().split('\\n')[0]")
            )
            assert (
                await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                != "none"
            )
        assert {"Calls", "Billing", "Sign out"} <= seen
        await page.get_by_role("link", name="Billing", exact=True).focus()
        await page.keyboard.press("Enter")
        await page.get_by_role("link", name="Invoices", exact=True).focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Invoices")


async def test_dark_and_light_follow_the_system_until_somebody_chooses(
    browser: Browser, shown: Demo
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with opened(browser, shown, color_scheme="dark") as page:
        dark = await page.evaluate(ground)
        await page.get_by_role("button", name="Switch between dark and light").click()
        light = await page.evaluate(ground)
        assert dark != light
        await page.goto("/dashboard/calls")
        assert await page.evaluate(ground) == light


async def test_an_invoice_downloads_with_the_sum_of_its_records(
    browser: Browser, shown: Demo
) -> None:
    with shown.context.store.read() as sql:
        wanted = invoices.listing(sql, tenant=shown.tenant)[0]
    async with opened(browser, shown) as page:
        await page.goto("/dashboard/invoices")
        async with page.expect_download() as downloading:
            await page.get_by_role("link", name="as CSV").first.click()
        text = (await (await downloading.value).path()).read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert sum(Decimal(row["cost"]) for row in rows) == Decimal(str(wanted["total"])) > 0


async def test_a_key_that_reads_bills_sees_money_and_no_machine(
    browser: Browser, shown: Demo
) -> None:
    async with opened(browser, shown, key=shown.keys["read-billing"]) as page:
        links = page.get_by_role("navigation").get_by_role("link")
        assert await links.all_inner_texts() == ["Overview", "Calls", "Billing"]
        await links.last.click()
        assert (await links.all_inner_texts())[3:] == ["Usage", "Budgets & quotas", "Invoices"]
        await expect(page.get_by_role("heading", name="Instances")).to_have_count(0)
        for path in PAGES[-3:]:
            answer = await page.goto(path)
            assert answer is not None
            assert answer.status == 403
            await expect(page.get_by_role("alert")).to_contain_text("admin")


async def test_a_tenant_that_did_nothing_yet_is_told_what_to_do(
    browser: Browser, shown: Demo
) -> None:
    key = (await shown.http.post("/v1/tenants", json={"name": "newcomer"})).json()["key"]["secret"]
    async with opened(browser, shown, key=key) as page:
        for said in (
            "pilotlight deploy app.py",
            "Nothing was spent",
            "No calls in this span",
        ):
            await expect(page.locator("main")).to_contain_text(said)
        await page.goto("/dashboard/usage")
        for said in ("No calls in the last 24 hours", "all functions are scaled to zero"):
            await expect(page.locator("main")).to_contain_text(said)
        for path in ("/dashboard/calls", "/dashboard/budgets", "/dashboard/invoices"):
            await page.goto(path)
            await expect(page.locator(".empty").first).to_be_visible()


async def test_hostile_names_are_text_wherever_they_show(browser: Browser, shown: Demo) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    key = (await shown.http.post("/v1/tenants", json={"name": "mallory"})).json()["key"]["secret"]
    theirs = (await shown.http.get("/v1/tenants")).json()["tenants"]
    tenant = next(t["id"] for t in theirs if t["name"] == "mallory")
    common = {
        "tenant": tenant,
        "app": hostile,
        "function": "</script><b>x",
        "method": "<i>m",
        "revision": "<u>r",
        "cost": "0.500000000000",
    }
    shown.add(
        [
            usage(
                f"<s>{n}/1", **common, function_id="f-evil", started_at=NOW - 60 * n, gpu="<h1>"
            ).to_json()
            for n in range(1, 4)
        ]
    )
    complaints = Complaints()
    async with opened(browser, shown, key=key, complaints=complaints) as page:
        await drawn(page)
        # of a removed function
        await expect(page.locator("section[aria-labelledby=newest]")).to_contain_text(
            f"{hostile}/</script><b>x"
        )
        for path in (
            "/dashboard/calls",
            "/dashboard/invoices/2027-01",
            "/dashboard/calls/%3Cs%3E1",
        ):
            answer = await page.goto(path)
            assert answer is not None
            assert answer.status == 200, path
            await expect(page.locator("main")).to_contain_text(hostile)
            assert await page.locator("main img, main s, main i, main u, main h1 h1").count() == 0
    assert complaints.found == []


async def test_another_tenants_things_do_not_exist(browser: Browser, shown: Demo) -> None:
    with shown.context.store.read() as sql:
        call = sql.exec_driver_sql(
            "SELECT call FROM usage WHERE tenant = ? AND kind = 'CALL' LIMIT 1", (shown.tenant,)
        ).scalar_one()
    async with opened(browser, shown, key=shown.other_key) as page:
        for path in (
            f"/dashboard/calls/{call}",
            "/dashboard/functions/chat/Assistant",
            "/dashboard/invoices/inv-000001",
        ):
            answer = await page.goto(path)
            assert answer is not None
            assert answer.status == 404, path
            await expect(page.get_by_role("heading", level=1)).to_have_text("Not found")
