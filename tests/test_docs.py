# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What the documents show is true: code runs, links lead somewhere, the option table is current.

A fenced ``python`` block is run; the blocks of one page run one after the other in one process,
in an empty folder. A block that cannot run alone has the word ``compile`` after its language, and
must still compile.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from markdown_it import MarkdownIt

from lightning_resilience import config


if TYPE_CHECKING:
    from markdown_it.token import Token


ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
OPTIONS = re.compile(r"<!-- options:begin -->\n(.*?)\n?<!-- options:end -->", flags=re.DOTALL)


def name_of(page: Path) -> str:
    """Return a page's path within the repository."""
    return page.relative_to(ROOT).as_posix()


def tokens_of(page: Path) -> list[Token]:
    """Return the parsed page, tables included."""
    return MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))


def python_blocks(page: Path, *, compiled_only: bool) -> list[Token]:
    """Return the fenced Python blocks of a page that are only compiled, or those that are run."""
    infos = [(token, token.info.split()) for token in tokens_of(page) if token.type == "fence"]
    return [
        token
        for token, words in infos
        if words[:1] == ["python"] and ("compile" in words[1:]) is compiled_only
    ]


def script_of(page: Path) -> str:
    """Return the blocks that are run, on the very lines on which the page has them."""
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in python_blocks(page, compiled_only=False):
        assert block.map is not None
        content = block.content.splitlines()
        lines[block.map[0] + 1 : block.map[0] + 1 + len(content)] = content
    return "\n".join(lines)


def links_of(page: Path) -> list[str]:
    """Return the targets of all links and pictures of a page."""
    inline = [child for token in tokens_of(page) for child in token.children or []]
    targets = [str(child.attrGet("href") or child.attrGet("src") or "") for child in inline]
    return [target for target in targets if target]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that a page's headings get when it is shown."""
    tokens = tokens_of(page)
    headings = [
        following.content
        for token, following in itertools.pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if script_of(page).strip()], ids=name_of)
def test_fenced_python_runs(page: Path, tmp_path: Path) -> None:
    """The Python blocks of a page run in their order in an empty folder."""
    code = f"exec(compile({script_of(page)!r}, {str(page)!r}, 'exec'), {{'__name__': '__main__'}})"

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fenced_python_compiles(page: Path) -> None:
    """A block that is marked as compiled only is at least Python."""
    for block in python_blocks(page, compiled_only=True):
        compile(block.content, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page: Path) -> None:
    """A link within the repository leads to a file, and its anchor to a heading."""
    broken = []
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        anchored = not anchor or target.suffix != ".md" or anchor in anchors_of(target)
        if not target.exists() or not anchored:
            broken.append(link)

    assert broken == []


def test_the_readme_has_the_option_table_of_the_code() -> None:
    """The README's table is what ``lightning-resilience options`` prints."""
    found = OPTIONS.findall((ROOT / "README.md").read_text(encoding="utf-8"))

    assert found == [config.options_markdown()]
