"""Hooks of mkdocs: the README is the site's first page, and pages of the root are pages of it."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OF_THE_ROOT = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "reporting.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "LICENSE.md": "LICENSE",
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds them, with links as they are from inside docs/."""
    for name, source in OF_THE_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source == "LICENSE":
            text = f"# Licence\n\n```text\n{text}\n```\n"
        text = text.replace("](docs/", "](").replace("](LICENSE)", "](LICENSE.md)")
        text = text.replace("](SECURITY.md)", "](reporting.md)")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Pages of docs/ name those of the root by the folder above; pages of folders in it, those of docs/."""
    if "/" in page.file.src_uri:
        return markdown
    markdown = markdown.replace("](../SECURITY.md", "](reporting.md")
    return markdown.replace("](../README.md", "](index.md").replace("](../", "](")
