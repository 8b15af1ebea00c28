"""Links and pictures of the documents lead to files of the project, and to headings that exist."""

import re
from pathlib import Path

import pytest

from docs import blocks
from install.building import ROOT, project_files

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def headings(text: str) -> set[str]:
    """Headings as the names that links use: "What works now" -> what-works-now."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def broken(page: str, text: str) -> list[str]:
    """Links of a page that lead nowhere."""
    known, found = set(project_files()), []
    for link in LINK.findall(blocks.BLOCK.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue  # of the web
        path, _, heading = link.partition("#")
        target = (Path(page).parent / path) if path else Path(page)
        name = str((ROOT / target).resolve().relative_to(ROOT))
        there = name in known or any(file.startswith(f"{name}/") for file in known)
        if not there or heading and heading not in headings((ROOT / name).read_text(encoding="utf-8")):
            found.append(link)
    return found


@pytest.mark.parametrize("page", blocks.pages())
def test_links_lead_somewhere(page: str) -> None:
    assert broken(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = {str((ROOT / "docs" / link).resolve().relative_to(ROOT)) for link in LINK.findall(index)}
    assert [page for page in blocks.pages() if page not in listed and page != "docs/index.md"] == []


def test_a_broken_link_is_found() -> None:
    text = "[a](docs/no_such.md) [b](docs/index.md) [c](docs/index.md#no-such) [d](#for-users) ![e](docs/no.png)"
    assert broken("README.md", text) == ["docs/no_such.md", "docs/index.md#no-such", "#for-users", "docs/no.png"]
    assert broken("docs/index.md", "[d](#for-users) [e](https://example.org)") == []
