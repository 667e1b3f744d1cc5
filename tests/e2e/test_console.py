"""The console in a headless browser, beside a load. Skipped where there is no Chromium.

CONSOLE_SCREENSHOTS=DIR keeps pictures of it there.
"""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from weir.testing.stack import Stack

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no browser: apt-get install chromium"),
]

MODEL = "smollm2-135m"
WAIT_MS = 60_000
LANES = ("interactive", "standard", "batch")


@pytest.fixture(scope="module")
def load(stack: Stack) -> Iterator[None]:
    """Requests one after the other in each lane, as long as a test runs."""
    ended = threading.Event()

    def ask(lane: str) -> None:
        number = 0
        while not ended.is_set():
            number += 1
            prompt = f"{lane} {number}: " + "A weir holds water back. " * (1 + number % 9)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "lane": lane}
            httpx.post(f"{stack.http_url}/v1/completions", json=body, timeout=120).raise_for_status()

    asking = [threading.Thread(target=ask, args=(lane,)) for lane in LANES for _ in range(2)]
    for thread in asking:
        thread.start()
    yield
    ended.set()
    for thread in asking:
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, stack: Stack) -> Iterator[Any]:
    """The console. Nothing that it does is an error, and all of it comes from the gateway."""
    page = open_page(browser, stack)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda asked: None if asked.url.startswith(stack.http_url) else problems.append(asked.url))
    page.goto(f"{stack.http_url}/console")
    yield page
    page.context.close()
    assert problems == []


def open_page(browser: Any, stack: Stack, scheme: str = "light", size: tuple[int, int] = (1280, 860)) -> Any:
    context = browser.new_context(color_scheme=scheme, viewport={"width": size[0], "height": size[1]})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    return page


def wait_live(page: Any) -> None:
    page.locator('#state[data-state="live"]').wait_for()
    page.locator("#workers tbody tr").first.wait_for()


def wait_for_tokens(page: Any) -> None:
    """Until answers are counted. (What evaluates code in the page until it holds is against the page's own policy.)"""
    figure = page.locator("#figures dd").first
    sync_api.expect(figure).not_to_have_text(re.compile(r"^(-|0\.0)$"), timeout=WAIT_MS)


def test_lanes_workers_arenas_and_latencies_are_shown_while_a_load_runs(page: Any, load: None) -> None:
    wait_live(page)
    assert page.locator("#lanes tbody td:first-child").all_inner_texts() == list(LANES)
    assert page.locator("#workers .duty-serving").count() >= 2
    page.locator("#latencies td", has_text="first token").first.wait_for()
    page.locator("#tenants td", has_text="default").first.wait_for()
    page.locator("#arenas .meter").first.wait_for()
    wait_for_tokens(page)


def test_the_page_map_and_the_steps_are_shown_and_a_step_leads_to_its_request(page: Any, load: None) -> None:
    page.keyboard.press("2")
    page.locator("svg.map path.leased").first.wait_for()
    assert "free" in str(page.locator("svg.map").first.get_attribute("aria-label"))
    button = page.locator("#timelines .names button").first
    button.wait_for()
    request_id = str(button.get_attribute("title"))
    button.click()
    page.locator("#waterfall h2", has_text=request_id).wait_for()


def test_a_requests_longest_phase_and_its_cause_are_three_clicks_away_at_most(
    page: Any, stack: Stack, load: None
) -> None:
    body = {"model": MODEL, "prompt": "Where is the time?", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{stack.http_url}/v1/completions", json=body, timeout=120).json()
    request_id = answer["id"].removeprefix("cmpl-")
    record = httpx.get(f"{stack.http_url}/debug/requests/{request_id}", timeout=30).json()["summary"]

    page.get_by_role("searchbox", name="Request id").click()  # the first; the id is typed, and Enter is no click
    page.keyboard.type(answer["id"])
    page.keyboard.press("Enter")
    said = page.locator("#longest")
    said.wait_for()
    assert record["longest_phase"].replace("_", "-") in said.inner_text()
    assert record["cause"] in said.inner_text()

    page.goto("about:blank")
    page.goto(f"{stack.http_url}/console")
    page.get_by_role("link", name="Requests").click()
    page.locator("#filters select[name=life]").select_option("finished")
    page.locator("#request-list button").first.click()
    said.wait_for()
    assert "Longest:" in said.inner_text()
    assert page.locator(".phases li.is-longest .cause").inner_text() != ""


def test_the_playground_streams_and_shows_what_comes_as_text_alone(page: Any, load: None) -> None:
    page.keyboard.press("4")
    page.locator("#model option").first.wait_for(state="attached")
    page.locator("#prompt").fill("<img src=x onerror=alert(1)> says hello")
    page.locator("#max-tokens").fill("12")
    page.keyboard.press("Tab")
    page.locator("#send").click()
    page.locator("#conversation .assistant .meta", has_text="tokens/s").wait_for()
    assert page.locator("#conversation .user .text").inner_text() == "<img src=x onerror=alert(1)> says hello"
    assert page.locator("#conversation img").count() == 0
    assert page.locator("#conversation .assistant .text").inner_text() != ""
    page.locator("#conversation .assistant button").click()
    page.locator("#longest").wait_for()


def test_everything_is_reached_by_the_keyboard(page: Any, load: None) -> None:
    wait_live(page)
    page.keyboard.press("?")
    assert page.locator("#shortcuts").get_attribute("open") is not None
    page.keyboard.press("Escape")
    assert page.locator("#shortcuts").get_attribute("open") is None
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "find-id"
    page.keyboard.press("Escape")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    page.keyboard.press("p")
    assert page.locator("#pause").get_attribute("aria-pressed") == "true"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, a')]"
        ".filter((one) => !(one.textContent.trim() || one.labels?.length || one.getAttribute('aria-label')))"
        ".map((one) => one.id)"
    )
    assert unnamed == []


@pytest.mark.parametrize(
    ("name", "scheme", "size"),
    [("light", "light", (1280, 860)), ("dark", "dark", (1280, 860)), ("narrow", "dark", (390, 800))],
)
def test_it_follows_the_wanted_theme_and_fits_narrow_screens(
    browser: Any, stack: Stack, load: None, tmp_path: Path, name: str, scheme: str, size: tuple[int, int]
) -> None:
    page = open_page(browser, stack, scheme, size)
    folder = Path(os.environ.get("CONSOLE_SCREENSHOTS", tmp_path))
    page.goto(f"{stack.http_url}/console")
    wait_live(page)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    wait_for_tokens(page)
    for number, view in ((1, "stack"), (2, "memory"), (3, "requests")):
        page.keyboard.press(str(number))
        if view == "memory":
            page.locator("#timelines .names button").first.wait_for()
        if view == "requests":
            page.locator("#request-list button").nth(2).click()
            page.locator("#longest").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), view
        page.screenshot(path=folder / f"{view}-{name}.png")
    page.context.close()
