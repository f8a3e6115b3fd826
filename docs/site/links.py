"""Check the links of a built site: every file and every anchor that a page names is there.

    python docs/site/links.py out/site              # inside; nothing leaves this machine
    python docs/site/links.py out/site --external   # asks the servers of all other links, too

What a page loads by itself (scripts, styles, pictures, fonts, frames) must lie in the site: it is
read without a network. Prints what is wrong, and ends with 1 if anything is.
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: By attribute, elements that load what it names; "link" only with one of these rel.
LOADS = {"src": None, "srcset": None, "poster": None, "data": ("object",)}
LOADED = {"stylesheet", "icon", "preload", "modulepreload", "manifest"}


class Page(HTMLParser):
    """Where a page's links lead, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for each element."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            rel = set(given.get("rel", "").split())
            (self.loads if tag == "link" and rel & LOADED else self.links).append(given["href"])
        for name, tags in LOADS.items():
            if name in given and (tags is None or tag in tags):
                value = given[name]
                parts = re.split(r",\s+", value) if name == "srcset" else [value]
                self.loads += [part.split()[0] if name == "srcset" else part for part in parts]
        self.loads += _of_style(given.get("style", ""))


def _of_style(text: str) -> list[str]:
    return [found.strip("'\" ") for found in re.findall(r"url\(([^)]*)\)", text)]


def check(root: Path) -> tuple[list[str], int, dict[str, list[str]]]:
    """Of a folder: what is wrong; how many links were followed; other sites' links, by address."""
    root = root.resolve()
    wrong: list[str] = []
    outside: dict[str, list[str]] = {}
    followed = 0

    @cache
    def page(path: Path) -> Page:
        return Page(path.read_text(encoding="utf-8"))

    def named() -> Iterator[tuple[Path, str, bool]]:
        for path in sorted(root.rglob("*.html")):
            yield from ((path, link, False) for link in page(path).links)
            yield from ((path, link, True) for link in page(path).loads)
        for path in sorted(root.rglob("*.css")):
            yield from ((path, link, True) for link in _of_style(path.read_text(encoding="utf-8")))

    for path, link, loaded in named():
        parts = urlsplit(link)
        here = path.relative_to(root)
        if parts.scheme in ("data", "mailto", "javascript", "about"):
            continue
        if parts.scheme or parts.netloc:
            if loaded:
                wrong.append(f"{here}: loads {link} from another site")
            else:
                outside.setdefault(link, []).append(str(here))
            continue
        followed += 1
        target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
        if parts.path.startswith("/") or not target.is_relative_to(root):
            wrong.append(f"{here}: {link} leads out of the site")
        elif not target.is_file():
            wrong.append(f"{here}: {link} is no file")
        elif parts.fragment and target.suffix == ".html" and not loaded:
            anchor = unquote(parts.fragment)
            if anchor not in page(target).anchors and "=" not in anchor:
                wrong.append(f"{here}: {link}: no such anchor")
    return wrong, followed, outside


def answer(address: str) -> str:
    """What a server says of an address: "" if all is well."""
    asked = urllib.request.Request(address, headers={"User-Agent": "flashsim's link check"})
    try:
        with urllib.request.urlopen(asked, timeout=20):
            return ""
    except (urllib.error.URLError, OSError) as error:
        return str(error)


def main() -> None:
    """Called as a command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--external", action="store_true")
    given = parser.parse_args()
    wrong, followed, outside = check(given.site)
    if not followed:
        sys.exit(f"no page in {given.site}")
    if given.external:
        with ThreadPoolExecutor(8) as pool:
            for address, said in zip(outside, pool.map(answer, outside), strict=True):
                if said:
                    first, others = outside[address][0], len(set(outside[address])) - 1
                    wrong.append(f"{first} and {others} more: {address}: {said}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    asked = "asked" if given.external else "not asked"
    print(
        f"{followed} links inside, {len(outside)} addresses elsewhere ({asked}): {len(wrong)} wrong"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
