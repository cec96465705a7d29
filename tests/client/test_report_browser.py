"""The report in a real browser: readable on a phone and a desk, light and dark, on paper; nothing is loaded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulated_comparison import comparison, fail, runs_of
from slipstream_client.report.page import write_report
from slipstream_client.report.study import Study

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LONG_NAME = "continuous,prefix_cache=off,max_num_batched_tokens=512"

# Elements that reach out of the window and lie in nothing that scrolls.
OVERFLOW = """() => [...document.querySelectorAll('body *')]
  .filter(e => !e.closest('.scroll') && !e.closest('svg') && e.checkVisibility())
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < -0.5)
  .map(e => `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`)"""
# Text whose contrast with what lies behind it is below that of WCAG AA.
CONTRAST = """() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b }
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor
      if (!/^rgba.*, 0\\)$/.test(c) && c !== 'transparent') return c } return 'rgb(255, 255, 255)' }
  return [...document.querySelectorAll('p, h1, h2, h3, td, th, dt, dd, li, .on, small, .axis span')]
    .filter(e => e.textContent.trim() && e.checkVisibility()).map(e => {
      const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x)
      return [(a + 0.05) / (b + 0.05), e.tagName + ' ' + e.textContent.trim().slice(0, 40)] })
    .filter(([ratio]) => ratio < 4.5).map(([ratio, what]) => `${ratio.toFixed(1)} ${what}`) }"""
CUT = """() => [...document.querySelectorAll('.on')]
  .filter(e => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"""
# Labels of charts on one another, or on a curve, a whisker or a marker, by more than a hair.
OVERLAPS = """() => [...document.querySelectorAll('.plot svg')].flatMap(svg => {
  const labels = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()])
    .filter(([text]) => text)
  const strokes = [...svg.querySelectorAll('.whisker, .marker')]
    .map(e => [e.className.baseVal, e.getBoundingClientRect()])
  for (const line of svg.querySelectorAll('.line')) for (let at = 0; at <= line.getTotalLength(); at += 2) {
    const p = line.getPointAtLength(at).matrixTransform(line.getScreenCTM())
    strokes.push([line.className.baseVal, new DOMRect(p.x, p.y, 0, 0)]) }
  const over = (p, q) => Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) >= 0 &&
    Math.min(p.right, q.right) - Math.max(p.left, q.left) >= 0
  const inner = r => new DOMRect(r.x + 1.5, r.y + 1.5, r.width - 3, r.height - 3)
  return labels.flatMap(([a, p], i) => [...labels.slice(i + 1), ...strokes]
    .filter(([_, q]) => over(inner(p), q)).map(([b]) => `${a} on ${b}`)) })"""
TIP = """e => { const s = getComputedStyle(e, '::after'); return [s.content, s.position] }"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with all that one can have: a sweep, open loops, failures, a long name."""
    variants = ("static", "dynamic", "iterative", "continuous", LONG_NAME)
    results, requests, steps = comparison(variants, ("c1", "c4", "c16", "r1", "r2"), count=12)
    more = comparison(variants, ("c16",), ("variance:0", "variance:1"), count=12)
    results["runs"] += more[0]["runs"]
    results["workloads"] += more[0]["workloads"]
    fail(results, requests + more[1], runs_of(results, "iterative", "r2"), 3, "refused: " + "x" * 300)
    study = Study(results, requests + more[1], steps + more[2])
    return write_report(study, tmp_path_factory.mktemp("report"), [])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The browser of this machine; none is downloaded."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path)
        yield started
        started.close()


@pytest.fixture(params=[(width, scheme) for width in (360, 1280) for scheme in ("light", "dark")], ids=str)
def shown(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    """The page at a width, in a scheme; it must have loaded nothing and said nothing on the console."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda sent: requested.append(sent.url))
    page.goto(report.as_uri())
    page.scheme = scheme
    yield page
    assert said == []
    assert requested == [report.as_uri()]
    page.close()


def test_nothing_reaches_out_of_the_window(shown: Any) -> None:
    assert shown.evaluate(OVERFLOW) == []
    shown.evaluate("() => document.querySelectorAll('details').forEach(each => each.open = true)")
    assert shown.evaluate(OVERFLOW) == []
    assert shown.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_text_has_the_contrast_of_text(shown: Any) -> None:
    assert shown.evaluate(CONTRAST) == []
    background = shown.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 26)"}[shown.scheme]


@pytest.mark.parametrize("kind", [".segment", ".hit", ".slice", ".request"])
def test_pointing_shows_text_within_the_window(shown: Any, kind: str) -> None:
    """At the first, the last and the middle of each kind of mark."""
    shown.evaluate(
        "k => document.querySelectorAll(k).forEach(e => e.classList.toggle('wide', e.offsetWidth > 4))", kind
    )
    marks = shown.locator(f"{kind}.wide:visible")
    count = marks.count()
    assert count > 10
    for at in (0, count // 2, count - 1):
        mark = marks.nth(at)
        assert mark.evaluate(TIP)[0] == "none"
        mark.hover(force=True)
        content, position = mark.evaluate(TIP)
        assert content.strip('"').replace("\\a ", "\n") == mark.get_attribute("data-tip")
        assert len(content) > 20
        assert position == "absolute"
        assert shown.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        shown.mouse.move(1, 1)


def test_the_keyboard_shows_it_too(shown: Any) -> None:
    shown.locator(".segment").first.focus()
    shown.keyboard.press("Tab")
    focused = shown.locator(".segment").nth(1)
    assert focused.evaluate("e => e === document.activeElement")
    assert focused.evaluate(TIP)[0].strip('"') == focused.get_attribute("data-tip")


def test_labels_of_charts_and_bars_do_not_overlap(shown: Any) -> None:
    shown.evaluate("() => document.querySelectorAll('details').forEach(each => each.open = true)")
    assert shown.locator(".plot text.at").count() >= 3
    assert shown.evaluate(OVERLAPS) == []
    assert shown.evaluate(CUT) == []


def test_it_prints_as_a_whole(browser: Any, report: Path, tmp_path: Path) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(report.as_uri())
    path = tmp_path / "report.pdf"
    page.pdf(path=path, format="A4", print_background=True)
    content = path.read_bytes()
    assert content.startswith(b"%PDF")
    assert 5 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 60
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.set_viewport_size({"width": 688, "height": 900})  # A4 without its margins
    assert page.evaluate(CUT) == []
    page.close()


@pytest.mark.parametrize("width", [480, 700, 920, 1100])
def test_between_phone_and_desk_it_fits_as_well(browser: Any, report: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(report.as_uri())
    assert page.evaluate(OVERFLOW) == []
    assert page.evaluate(CUT) == []
    page.close()
