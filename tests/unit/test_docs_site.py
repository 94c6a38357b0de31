"""`make docs`: the site is built without a complaint, leads nowhere but into itself, and loads nothing from anywhere else."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.pages import PAGES, ROOT

pytest.importorskip("mkdocs")


class Links(HTMLParser):
    """What a page loads, what it links to, and the places that can be linked to."""

    def __init__(self, text: str):
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found.get("id", ""), found.get("name", "")}
        if tag == "a":
            self.linked.append(found.get("href", ""))
        else:
            self.loaded += [found[name] for name in ("src", "href", "srcset", "action") if found.get(name)]

    handle_startendtag = handle_starttag


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)  # ends with Abort at a warning: a link, an anchor, a page without a place
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {path: Links(path.read_text()) for path in site.rglob("*.html")}


def test_every_page_is_there(site: Path) -> None:
    for page in PAGES:
        assert (site / page.relative_to(ROOT).name.lower()).with_suffix(".html").exists(), page
    assert (site / "source/docs/examples/doubles.yaml.html").exists() and (site / "source/megaflow/trainer/loop.py.html").exists()


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Links], site: Path) -> None:
    for path, page in pages.items():
        assert not [url for url in page.loaded if urlsplit(url).netloc], path
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text() and "@import" not in style.read_text(), style


def test_links_lead_somewhere(pages: dict[Path, Links], site: Path) -> None:
    for path, page in pages.items():
        for url in page.linked:
            parts = urlsplit(url)
            if parts.netloc or parts.scheme or path.name == "404.html":
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            assert target.exists() and target.is_relative_to(site), f"{path.relative_to(site)}: {url}"
            assert not parts.fragment or unquote(parts.fragment) in pages[target].ids, f"{path.relative_to(site)}: {url}"


def test_search_finds_keys_and_messages(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    words = ("prometheus_port", "expandable_segments", "ReMax")
    found = {word: [d["location"] for d in index["docs"] if word in d["text"]] for word in words}
    assert any(where.startswith("config.html") for where in found["prometheus_port"])
    assert any(where.startswith("troubleshooting.html") for where in found["expandable_segments"]) and found["ReMax"]
