"""`scripts/screenshots`: pictures of the dashboard for docs/pictures/, by real Chromium, over a
month of made-up records.

The records are priced and taken into the ledger like any others. Needs Playwright and Chromium;
`--only overview` makes one of them. `pages/` has every page of the navigation on a desktop and on a
phone."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright, expect

from pilotlight.controller.dashboard.navigation import SECTIONS
from tests.fakes.demo_platform import Demo, demo, furnish

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
CHROMIUM = "/usr/bin/chromium"
DESKTOP, PHONE = (1280, 860), (390, 844)
LARGEST_BYTES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One of them. `height`: of what is shown; None = all of the page. `quality`: of a JPEG; None =
    a PNG."""

    name: str
    path: str
    dark: bool = False
    size: tuple[int, int] = DESKTOP
    height: int | None = None
    quality: int | None = None


PICTURES_WANTED = (
    Picture(name="overview-light", path="/dashboard?span=30d", height=1420),
    Picture(name="overview-dark", path="/dashboard?span=30d", dark=True, height=1420),
    Picture(name="overview-phone", path="/dashboard?span=7d", size=PHONE, height=1500),
    Picture(name="function-light", path="/dashboard/functions/search/embed?span=30d", height=1300),
    Picture(name="calls-dark", path="/dashboard/calls", dark=True, height=860),
    Picture(name="budgets-light", path="/dashboard/budgets", height=1080),
    Picture(
        name="budgets-phone-dark", path="/dashboard/budgets", size=PHONE, dark=True, height=1100
    ),
    Picture(name="invoices-light", path="/dashboard/invoices", height=420),
    Picture(name="platform-dark", path="/dashboard/platform?span=30d", dark=True, height=640),
    Picture(name="storage-light", path="/dashboard/platform/storage", height=860),
    Picture(name="models", path="/dashboard/models", height=1140),
    *(
        Picture(
            name=f"pages/{page.path.rpartition('/')[2]}-{name}",
            path=page.path,
            size=size,
            height=height,
            quality=60,
        )
        for section in SECTIONS
        for page in section.pages
        for name, size, height in (("desktop", DESKTOP, 1100), ("phone", PHONE, 1500))
    ),
)


async def main() -> None:
    """Make them."""
    wanted = argparse.ArgumentParser(description=__doc__)
    wanted.add_argument("--only", default="", help="part of a picture's name")
    wanted.add_argument("--to", type=Path, default=PICTURES, help="directory")
    asked = wanted.parse_args()
    (asked.to / "pages").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pl") as directory:
        home, run = Path(directory) / "home", Path(directory) / "run"
        home.mkdir()
        run.mkdir()
        async with demo(home, run, clock=time.time) as made, async_playwright() as playwright:
            await furnish(made, now=time.time())
            browser = await playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--hide-scrollbars"]
            )
            for picture in PICTURES_WANTED:
                if asked.only in picture.name:
                    await _take(browser, made, picture, asked.to)
            await browser.close()


async def _take(browser: Browser, made: Demo, picture: Picture, to: Path) -> None:
    width, height = picture.size
    context = await browser.new_context(
        viewport={"width": width, "height": picture.height or height},
        color_scheme="dark" if picture.dark else "light",
        device_scale_factor=1 if width > 600 else 1.5,
        reduced_motion="reduce",
    )
    page = await context.new_page()
    await page.goto(f"{made.url}/dashboard/login")
    await page.fill("#key", made.keys["admin"])
    await page.click("button.go")
    await page.goto(made.url + picture.path)
    await drawn(page)
    file = to / f"{picture.name}.{'png' if picture.quality is None else 'jpg'}"
    await page.screenshot(
        path=file,
        full_page=picture.height is None,
        type="png" if picture.quality is None else "jpeg",
        quality=picture.quality,
    )
    await context.close()
    size = file.stat().st_size
    print(f"{file} {size // 1000} kB{'' if size <= LARGEST_BYTES else ': too large for the docs'}")


async def drawn(page: Page) -> None:
    """Until every chart of the page is there."""
    await expect(page.locator(".plot:not(:has(.main-svg))")).to_have_count(0)


if __name__ == "__main__":
    asyncio.run(main())
