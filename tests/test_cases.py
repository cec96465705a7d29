"""The table of public failures (`tests/cases/README.md`) against the tests that it names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NUM_CASES = 105
MOST_NOT_APPLICABLE = 5
LATER = {"GTW": "later: with the gateway", "BEN": "later: with the load generator"}


def read_table() -> list[tuple[str, str, str]]:
    """Id, situation, and where it is tested, of every line."""
    lines = (TESTS / "cases" / "README.md").read_text(encoding="utf-8").splitlines()
    head = lines.index("| id | situation | where it is tested |")
    rows = [line for line in lines[head + 2 :] if line.strip()]
    cells = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]
    assert all(len(row) == 3 for row in cells), "a line of the table has not three cells"
    return cells  # type: ignore[return-value]


TABLE = read_table()
TESTED = [row for row in TABLE if row[2].startswith("`")]


@cache
def docstrings(file: str) -> dict[str, str]:
    """What each test of a file says that it proves; its name is a part of that."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: f"{node.name}\n{ast.get_docstring(node)}" for node in functions if node.name.startswith("test_")}


def test_every_case_has_one_line_with_its_situation() -> None:
    ids = [case for case, _, _ in TABLE]
    assert [case for case, count in Counter(ids).items() if count > 1] == []
    assert len(ids) == NUM_CASES
    assert [case for case in ids if not re.fullmatch(r"[A-Z]{3}-\d\d", case)] == []
    assert [case for case, situation, _ in TABLE if not 3 <= len(situation.split()) <= 20] == []


@pytest.mark.parametrize(
    ("case", "where"), [(case, where) for case, _, where in TESTED], ids=[row[0] for row in TESTED]
)
def test_every_test_that_is_named_exists_and_names_its_case(case: str, where: str) -> None:
    for place in where.split("<br>"):
        found = re.fullmatch(r"`([\w/]+/test_\w+\.py)::(test_\w+)`", place)
        assert found, f"{place} is not `folder/test_file.py::test_name`"
        file, test = found.groups()
        assert (TESTS / file).is_file(), f"there is no tests/{file}"
        assert test in docstrings(file), f"tests/{file} has no {test}"
        assert case in docstrings(file)[test], f"{test} does not name {case}"


def test_every_test_that_names_a_case_stands_in_its_line() -> None:
    lines = {case: where for case, _, where in TABLE}
    areas = "|".join(sorted({case[:3] for case in lines}))
    missing = [
        f"{case}: `{file}::{test}`"
        for file in sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py"))
        for test, text in docstrings(file).items()
        for case in re.findall(rf"\b(?:{areas})-\d\d\b", text)
        if f"`{file}::{test}`" not in lines.get(case, "")
    ]
    assert missing == []


def test_a_case_without_a_test_says_why() -> None:
    without = {case: where for case, _, where in TABLE if not where.startswith("`")}
    later = {case for case, where in without.items() if where == LATER.get(case[:3])}
    not_applicable = {case for case, where in without.items() if re.match(r"not applicable: \w+ ", where)}
    assert set(without) - later - not_applicable == set()
    assert len(not_applicable) <= MOST_NOT_APPLICABLE
