"""Check every link of the built site, and the size of its pages, offline: `python docs/site/check_links.py build/docs`.

A relative link must lead to a file, and to a place in it if it names one; an external link must be a valid address.
Scripts, styles and pictures must come from the site itself, so that it can be read without a network.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ADDRESS = re.compile(r"https?://[\w.-]+\.[a-z]{2,}(:\d+)?(/\S*)?$")
# largest size of a page in bytes, without pictures, scripts and styles
LIMIT = 250_000
LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "object": "data"}


class Page(HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADED and LOADED[tag] in found:
            self.loaded.append(found[LOADED[tag]])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(found["href"])


def problems(site: Path) -> list[str]:
    """Return a line for each link of the site that leads nowhere, and for each page that is too large."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        if (size := path.stat().st_size) > LIMIT:
            wrong.append(f"{name}: has {size:,} bytes, more than {LIMIT:,}: split it")
        for link in page.links:
            if reason := _wrong(link, path, pages):
                wrong.append(f"{name}: {link}: {reason}")
        for link in page.loaded:
            if urlsplit(link).scheme not in ("", "data") or link.startswith("//"):
                wrong.append(f"{name}: {link}: is loaded from elsewhere")
            elif reason := _wrong(link, path, pages):
                wrong.append(f"{name}: {link}: {reason}")
    return wrong if pages else [f"{site} contains no page"]


def _wrong(link: str, path: Path, pages: dict[Path, Page]) -> str | None:
    parts = urlsplit(link)
    if parts.scheme in ("mailto", "data"):
        return None
    if parts.scheme:
        return None if ADDRESS.match(link) else "is not an address"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return "the file does not exist"
    place = unquote(parts.fragment)
    if place and target in pages and place not in pages[target].places:
        return "the place does not exist in it"
    return None


def main(arguments: list[str]) -> int:
    """Print every problem; return 1 if there is one."""
    problems_found = problems(Path(arguments[0]))
    print("\n".join(problems_found) or "every link leads somewhere, and no page is too large")
    return 1 if problems_found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
