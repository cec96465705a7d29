"""Reads a report as the tests ask about it: its rows, its figures, its text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from slipstream_client.report.page import write_report
from slipstream_client.report.study import Study

VOID = {"meta", "br"}
SHAPES = {"rect", "line", "path"}  # of a drawing; they close themselves


class Page(HTMLParser):
    """The parts of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.cells: list[tuple[dict[str, str | None], dict[str, str | None]]] = []  # attributes of row and cell
        self.text = ""
        self._row: dict[str, str | None] = {}
        self.feed(self.html)
        assert self.open == [], "an element was not closed"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SHAPES
        self.tags.append((tag, dict(attrs)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self._row = dict(attrs)
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.cells.append((self._row, dict(attrs)))
        if tag == "small" and "td" in self.open:
            self.rows[-1][-1] += " "

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("p", "section", "small", "h2", "h3"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def rows_of(self, name: str, columns: int) -> list[list[str]]:
        """The rows of that many cells whose head is `name`."""
        return [row for row in self.rows if row and row[0] == name and len(row) == columns]

    def value(self, key: str, **row: str) -> float:
        """The figure `key` in the row with these attributes, such as variant="static"."""
        wanted = {f"data-{name}": value for name, value in row.items()}
        found = [
            cell["data-value"]
            for its_row, cell in self.cells
            if cell.get("data-key") == key and wanted.items() <= its_row.items()
        ]
        assert len(found) == 1, f"{key} of {row} is there {len(found)} times"
        assert found[0] is not None
        return float(found[0])

    def marked(self, **attributes: str) -> list[dict[str, str | None]]:
        """Every element with these data attributes."""
        wanted = {f"data-{name}": value for name, value in attributes.items()}
        return [found for _, found in self.tags if wanted.items() <= found.items()]

    @property
    def tips(self) -> list[str]:
        """What the pointer shows."""
        return [found["data-tip"] or "" for _, found in self.tags if "data-tip" in found]


def write_page(
    out: Path, results: dict[str, Any], requests: list[dict], steps: list[dict], changes: Any = None
) -> Page:
    """Write a report and read it."""
    return Page(write_report(Study(results, requests, steps), out, changes))
