"""A hook of mkdocs: what pages link to outside of docs/ becomes part of the site, so that no link needs a code host.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages of the navigation; a linked source file becomes a page with its text under source/,
a linked folder a list of its files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".jsonl": "json", ".sh": "bash", ".sbatch": "bash"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of PAGES, and one for each file or folder that a page links to outside of the pages themselves."""
    for file in [file for file in files if file.src_uri.startswith("examples/") and not file.is_documentation_page()]:
        files.remove(file)  # browsers would download them; they are shown as pages
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=rewritten((ROOT / name).read_text(), ROOT, uri)))
    seen = {target for page in [*DOCS.glob("*.md"), *(ROOT / name for name in PAGES)] for target in sources(page)}
    for target in sorted(seen):
        files.append(File.generated(config, source_uri(target), content=source_page(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of docs/*.md; those of generated pages are right already."""
    is_own = (DOCS / page.file.src_uri).is_file()
    return rewritten(markdown, DOCS, page.file.src_uri) if is_own else markdown


def rewritten(markdown: str, folder: Path, uri: str) -> str:
    """Links that are relative to `folder` as links of the site's page `uri`; a page's title where its file is named."""

    def link(match: re.Match[str]) -> str:
        target = resolved(match[2], folder)
        if target is None:
            return match[0]
        is_name = re.fullmatch(r"[\w-]+\.md", match[1]) is not None
        text = title(target) if is_name and target.suffix == ".md" else match[1]
        return f"[{text}]({os.path.relpath(site_uri(target), os.path.dirname(uri) or '.')}{match[3] or ''})"

    return LINK.sub(link, markdown)


def title(page: Path) -> str:
    return (ROOT / page).read_text().partition("\n")[0].removeprefix("# ")


def resolved(link: str, folder: Path) -> Path | None:
    """The file or folder that a link means, relative to the repository; None for addresses and for what is not there."""
    if re.match(r"\w+:", link):
        return None
    target = (folder / link).resolve()
    return target.relative_to(ROOT) if target.exists() and target.is_relative_to(ROOT) else None


def site_uri(target: Path) -> str:
    """Where the site has it."""
    if str(target) in PAGES:
        return PAGES[str(target)]
    is_page_or_picture = target.parts[0] == "docs" and "examples" not in target.parts
    return str(target.relative_to("docs")) if is_page_or_picture else source_uri(target)


def source_uri(target: Path) -> str:
    return f"source/{target}/index.md" if (ROOT / target).is_dir() else f"source/{target}.md"


def sources(page: Path) -> set[Path]:
    """What a page links to that has no page yet."""
    targets = {resolved(match[2], page.parent) for match in LINK.finditer(page.read_text())}
    return {target for target in targets if target is not None and site_uri(target).startswith("source/")}


def source_page(target: Path) -> str:
    path = ROOT / target
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.is_file())
        return f"# {target}/\n\n" + "".join(f"- `{target}/{name}`\n" for name in names)
    fence = "````"  # a docstring may hold a fence of three
    return f"# {target}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n{fence}\n"
