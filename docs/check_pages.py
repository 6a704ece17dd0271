"""Checks the built documentation in headless Chromium at two widths.

    pip install playwright && playwright install chromium     # or --chromium with the path of one
    make docs && python docs/check_pages.py --shots runs/pages

It opens every page of ``docs/_build/html``, and reports what is wider than the page, pictures that do not load, links
to files or places that are not there, and errors of scripts. With ``--shots`` it writes a picture of each page. Links
to other sites are not followed. The exit code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Page, sync_playwright

HTML = Path(__file__).parent / "_build" / "html"
WIDTHS = {"wide": 1280, "narrow": 400}

_WIDER = """() => {
    const limit = document.documentElement.clientWidth + 1, found = [];
    if (document.documentElement.scrollWidth > limit) found.push('the page');
    const scrolls = e => e && (getComputedStyle(e).overflowX !== 'visible' || scrolls(e.parentElement));
    for (const e of document.querySelectorAll('article *'))
        if (e.getBoundingClientRect().right > limit && !scrolls(e.parentElement))
            found.push(e.tagName + ': ' + e.textContent.slice(0, 60));
    return found.slice(0, 5);
}"""
_PICTURES = """() => [...document.images]
    .filter(i => getComputedStyle(i).display !== 'none' && !(i.complete && i.naturalWidth)).map(i => i.src)"""
_LINKS = "() => [...document.querySelectorAll('a[href]')].map(a => a.href)"
_NAMES = "() => [...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name)"


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--html", type=Path, default=HTML)
    options.add_argument("--chromium", help="the path of a Chromium; the default is playwright's own")
    options.add_argument("--shots", type=Path, help="the folder for a picture of each page and width")
    options.add_argument("--dark", action="store_true", help="as a browser that prefers dark pages")
    arguments = options.parse_args()
    html = arguments.html.resolve()
    pages = sorted(path for path in html.rglob("*.html") if "_modules" not in path.parts)
    if not pages:
        sys.exit(f"there are no pages in {arguments.html}: make docs")
    problems, failed, names, links = list[str](), list[Any](), dict[Path, set[str]](), dict[Path, list[str]]()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        for width_name, width in WIDTHS.items():
            scheme = "dark" if arguments.dark else "light"
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab.on("pageerror", lambda error: failed.append(error))
            for path in pages:
                tab.goto(path.as_uri(), wait_until="load")
                shown = f"{path.relative_to(html)}, {width_name}"
                problems += [f"{shown}: {each}" for each in look_at(tab)]
                names[path], links[path] = set(tab.evaluate(_NAMES)), tab.evaluate(_LINKS)
                if arguments.shots:
                    arguments.shots.mkdir(parents=True, exist_ok=True)
                    name = "-".join(path.relative_to(html).with_suffix("").parts)
                    tab.screenshot(path=arguments.shots / f"{name}-{width_name}.png", full_page=True)
        browser.close()
    problems += [f"a script failed: {error}" for error in failed]
    problems += dead_links(links, names)
    for problem in problems:
        print(problem)
    print(
        f"{len(pages)} pages at {len(WIDTHS)} widths, {sum(map(len, links.values()))} links: {len(problems)} problems"
    )
    return 1 if problems else 0


def look_at(tab: Page) -> Iterator[str]:
    """Yield what is wrong with the page that is shown. Pictures below load only once they are scrolled to."""
    tab.evaluate("() => [...document.images].forEach(image => image.loading = 'eager')")
    tab.wait_for_load_state("networkidle")
    yield from (f"wider than the page: {each}" for each in tab.evaluate(_WIDER))
    yield from (f"no picture: {each}" for each in tab.evaluate(_PICTURES))


def dead_links(links: dict[Path, list[str]], names: dict[Path, set[str]]) -> Iterator[str]:
    """Yield the links to files that are not there, and to places that a page does not have."""
    for page, targets in links.items():
        for target in dict.fromkeys(targets):
            parts = urlsplit(target)
            path = Path(unquote(parts.path))
            if parts.scheme != "file":
                continue
            if not path.exists():
                yield f"{page.name}: no file {path}"
            elif parts.fragment and path in names and unquote(parts.fragment) not in names[path]:
                yield f"{page.name}: no place {path.name}#{parts.fragment}"


if __name__ == "__main__":
    sys.exit(main())
