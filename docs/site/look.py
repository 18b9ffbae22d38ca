"""Look at every page of the built site in Chromium: `python docs/site/look.py build/docs [PART OF A NAME]`.

At 1280 and 390 px, light and dark: nothing sticks out sideways, every picture has words, and axe finds nothing serious;
on paper nothing is cut. A line for each problem, and 1 at the end where there is one.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

# what is wider than its window, where nothing around it scrolls; the theme lets the whole article scroll on a telephone
OUTSIDE = """() => {
  const wide = document.documentElement.clientWidth + 1;
  const scrolls = one => one && !one.matches("article, body") &&
    (/auto|scroll/.test(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
  return [...document.querySelectorAll("article *, .mobile-header *, footer *")]
    .filter(one => one.getBoundingClientRect().right > wide && one.checkVisibility() && !scrolls(one.parentElement))
    .slice(0, 3).map(one => one.outerHTML.slice(0, 120));
}"""
WORDLESS = "() => [...document.images].filter(one => !one.alt.trim()).map(one => one.getAttribute('src'))"
SERIOUS = """async () => (await axe.run({resultTypes: ["violations"], preload: false})).violations
  .filter(one => ["serious", "critical"].includes(one.impact))
  .flatMap(one => one.nodes.slice(0, 3).map(node => one.id + ": " + node.html.slice(0, 160)))"""
UNFOLD = "document.querySelectorAll('details').forEach(fold => { fold.open = true; })"
# an A4 sheet less its margins, in CSS pixels
SHEET = {"width": 718, "height": 1000}


def problems(browser: Any, axe: str, page: Path) -> list[str]:
    """Return a line for each thing that is wrong with a page."""
    found = []
    seen = browser.new_page()
    seen.goto(page.as_uri())
    seen.evaluate(UNFOLD)
    seen.evaluate(axe)
    for scheme in ("light", "dark"):
        seen.emulate_media(color_scheme=scheme)
        for width in (1280, 390):
            seen.set_viewport_size({"width": width, "height": 900})
            here = f"{scheme} {width}"
            found += [f"{here}: sticks out: {one}" for one in seen.evaluate(OUTSIDE)]
            found += [f"{here}: no alt: {one}" for one in seen.evaluate(WORDLESS)]
            found += [f"{here}: axe: {one}" for one in seen.evaluate(SERIOUS)]
    seen.set_viewport_size(SHEET)
    seen.emulate_media(media="print", color_scheme="light")
    # what scrolls on a screen is cut on paper
    cut = "one => one.scrollWidth > one.clientWidth + 1 && one.checkVisibility()"
    wide = seen.evaluate(f"() => [...document.querySelectorAll('article pre, article table')].filter({cut}).length")
    found += [f"print: sticks out: {one}" for one in seen.evaluate(OUTSIDE)]
    found += [f"print: {wide} tables or blocks are cut"] * bool(wide)
    seen.close()
    return found


def main(arguments: list[str]) -> int:
    """Print every problem; return 1 where there is one."""
    site, part = Path(arguments[0]).resolve(), "".join(arguments[1:])
    carried = find_spec("axe_playwright_python")
    assert carried is not None and carried.origin is not None
    axe = (Path(carried.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    pages = [path for path in sorted(site.rglob("*.html")) if part in str(path.relative_to(site))]
    wrong = 0
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for path in pages:
            for line in problems(browser, axe, path):
                print(f"{path.relative_to(site)}: {line}", flush=True)
                wrong += 1
    print(f"{len(pages)} pages, {wrong} problems")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
