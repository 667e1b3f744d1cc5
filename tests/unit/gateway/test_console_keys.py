"""The console in a browser where keys are in force. Skipped where there is no Chromium."""

import re
import shutil

import pytest
from tests.unit.gateway.test_recent_requests import GUARDED, OPERATOR
from tests.unit.gateway.test_tenants_at_the_frontends import write
from tests.unit.gateway.world import World

async_api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no browser: apt-get install chromium")


async def test_the_page_asks_for_an_operators_key_and_keeps_it_in_its_tab_alone(world: World) -> None:
    await write(world, GUARDED)
    async with async_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = await browser.new_context()
        page = await context.new_page()
        page.set_default_timeout(30_000)
        await page.goto(f"{world.http_url}/console")
        await page.locator("#key-dialog[open]").wait_for()
        assert "an admin key is needed" in await page.locator("#problem").inner_text()
        await page.locator("#operator-key").fill("a-wrong-key-of-nobody")
        await page.keyboard.press("Enter")
        await async_api.expect(page.locator("#problem")).to_have_text(re.compile("not known"), timeout=30_000)
        await page.keyboard.press("k")
        await page.locator("#operator-key").fill(OPERATOR)
        await page.keyboard.press("Enter")
        await page.locator('#state[data-state="live"]').wait_for()
        await page.reload()
        await page.locator('#state[data-state="live"]').wait_for()
        kept = await page.evaluate("JSON.stringify([{...localStorage}, document.cookie, location.href])")
        assert OPERATOR not in kept
        other = await context.new_page()
        await other.goto(f"{world.http_url}/console")
        await other.locator("#key-dialog[open]").wait_for()
        await browser.close()
