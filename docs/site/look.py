"""Look at every page of the built site in Chromium: `python docs/site/look.py build/docs [PART OF A NAME]`.

At widths of 1280 and 390 px, light and dark: nothing overflows sideways, every image has an alt text, and axe reports
nothing serious. In print nothing is cut off. Print a line for each problem, and exit with 1 if there is one.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

# Elements that overflow the window and that no ancestor scrolls; the theme lets the whole article scroll on a phone.
OVERFLOWING = """() => {
  const wide = document.documentElement.clientWidth + 1;
  const scrolls = one => one && !one.matches("article, body") &&
    (/auto|scroll/.test(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
  return [...document.querySelectorAll("article *, .mobile-header *, footer *")]
    .filter(one => one.getBoundingClientRect().right > wide && one.checkVisibility() && !scrolls(one.parentElement))
    .slice(0, 3).map(one => one.outerHTML.slice(0, 120));
}"""
WITHOUT_ALT = "() => [...document.images].filter(one => !one.alt.trim()).map(one => one.getAttribute('src'))"
SERIOUS = """async () => (await axe.run({resultTypes: ["violations"], preload: false})).violations
  .filter(one => ["serious", "critical"].includes(one.impact))
  .flatMap(one => one.nodes.slice(0, 3).map(node => one.id + ": " + node.html.slice(0, 160)))"""
UNFOLD = "document.querySelectorAll('details').forEach(fold => { fold.open = true; })"
# An A4 sheet without its margins, in CSS pixels.
SHEET = {"width": 718, "height": 1000}


def problems(browser: Any, axe: str, page: Path) -> list[str]:
    """Return a line for each problem of a page."""
    lines = []
    view = browser.new_page()
    view.goto(page.as_uri())
    view.evaluate(UNFOLD)
    view.evaluate(axe)
    for scheme in ("light", "dark"):
        view.emulate_media(color_scheme=scheme)
        for width in (1280, 390):
            view.set_viewport_size({"width": width, "height": 900})
            here = f"{scheme} {width}"
            lines += [f"{here}: overflows: {one}" for one in view.evaluate(OVERFLOWING)]
            lines += [f"{here}: no alt: {one}" for one in view.evaluate(WITHOUT_ALT)]
            lines += [f"{here}: axe: {one}" for one in view.evaluate(SERIOUS)]
    view.set_viewport_size(SHEET)
    view.emulate_media(media="print", color_scheme="light")
    # What scrolls on a screen is cut off on paper.
    cut = "one => one.scrollWidth > one.clientWidth + 1 && one.checkVisibility()"
    wide = view.evaluate(f"() => [...document.querySelectorAll('article pre, article table')].filter({cut}).length")
    lines += [f"print: overflows: {one}" for one in view.evaluate(OVERFLOWING)]
    lines += [f"print: {wide} tables or blocks are cut"] * bool(wide)
    view.close()
    return lines


def main(arguments: list[str]) -> int:
    """Print every problem; return 1 if there is one."""
    site, part = Path(arguments[0]).resolve(), "".join(arguments[1:])
    package = find_spec("axe_playwright_python")
    assert package is not None and package.origin is not None
    axe = (Path(package.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    pages = [path for path in sorted(site.rglob("*.html")) if part in str(path.relative_to(site))]
    count = 0
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for path in pages:
            for line in problems(browser, axe, path):
                print(f"{path.relative_to(site)}: {line}", flush=True)
                count += 1
    print(f"{len(pages)} pages, {count} problems")
    return 1 if count or not pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
