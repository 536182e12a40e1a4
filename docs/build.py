"""Build the documentation as a site that works from disk: `make docs`.

    python docs/build.py          writes build/site; a broken link or a page outside the navigation is an error
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "build" / "site"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
WORKER = re.compile(r'<script src="https://unpkg\.com/[^"]*"[^>]*></script>')


def pages_in(nav: Any) -> list[str]:
    """The pages of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_in(part)]


def problems(pages: list[str]) -> list[str]:
    """Pages that are missing or outside the navigation, and links that lead nowhere."""
    found = [f"{page} is in mkdocs.yml and not in docs/" for page in pages if not (DOCS / page).is_file()]
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    found += [f"docs/{page} is not in the navigation of mkdocs.yml" for page in sorted(there - set(pages))]
    for page in sorted(there):
        for target in LINK.findall(without_code((DOCS / page).read_text(encoding="utf-8"))):
            if not target.startswith(("http:", "https:", "mailto:")) and not leads_somewhere(DOCS / page, target):
                found.append(f"docs/{page}: the link to {target} leads nowhere")
    return found


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists() or (path.is_dir() and anchor):
        return False
    return not anchor or path.suffix != ".md" or anchor in anchors(path)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site generates them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", each.replace("`", "")).strip().lower()) for each in headings}


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def write_text_versions(pages: list[str]) -> None:
    """`llms.txt` lists the pages, `llms-full.txt` holds them, and each page's Markdown lies beside it."""
    index, full = ["# loopwright", "", "> Trains models in Python, with the API of transformers' Trainer.", ""], []
    for page in pages:
        text = (DOCS / page).read_text(encoding="utf-8")
        index.append(f"- [{text.partition(chr(10))[0].lstrip('# ')}]({page})")
        full.append(text)
        (SITE / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOCS / page, SITE / page)
    (SITE / "llms.txt").write_text("\n".join(index) + "\n", encoding="utf-8")
    (SITE / "llms-full.txt").write_text("\n\n".join(full), encoding="utf-8")


def make_local() -> None:
    """Replace the one script that the theme would fetch from another host."""
    for page in SITE.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        up = "../" * (len(page.relative_to(SITE).parts) - 1)
        page.write_text(WORKER.sub(f'<script src="{up}assets/worker.js"></script>', text), encoding="utf-8")


def main() -> int:
    pages = pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    found = problems(pages)
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    shutil.rmtree(SITE, ignore_errors=True)
    built = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=ROOT)
    if built.returncode:
        return built.returncode
    write_text_versions(pages)
    make_local()
    print(f"open {SITE.relative_to(ROOT)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
