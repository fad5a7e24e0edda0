"""What the docs name is there: tests, files, commands, arguments, reasons."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import transformer_engine.pytorch as te

from te_offload import Fate, OffloadSession, Reason, ops

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LIVING = [page for page in PAGES if page.parent.name != "results"]  # the others are of their day


@pytest.mark.parametrize("page", LIVING, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    there = {path.stem for path in files}
    there |= {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = set(re.findall(r"\btest_\w+", page.read_text()))
    assert named <= there


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", LIVING, ids=lambda page: page.name)
def test_every_command_of_a_page_is_a_module(page: Path) -> None:
    for module in re.findall(r"\./run ((?:benchmarks|examples)\.\w+)", page.read_text()):
        assert importlib.util.find_spec(module) is not None, module


def _rows(page: str, header: str) -> list[list[str]]:
    """The cells of a table's rows."""
    lines = (ROOT / page).read_text().splitlines()
    rows = []
    for line in lines[lines.index(header) + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_table_of_the_session_s_arguments_is_its_signature() -> None:
    section = (ROOT / "docs/offloading.md").read_text().split("\n## The session\n")[1].split("\n## ")[0]
    names = [name for cell in re.findall(r"^\| (`[^|]*) \|", section, re.M) for name in re.findall(r"`(\w+)`", cell)]
    assert names == list(inspect.signature(OffloadSession).parameters)


def test_table_of_the_ops_keywords_has_all_that_te_ops_have_not() -> None:
    section = (ROOT / "docs/offloading.md").read_text().split("\n## The ops\n")[1].split("\n## ")[0]
    classes = re.findall(r"`((?:Scaled|Grouped)\w+)`", section.split("\n|")[0])
    assert set(classes) == {
        name for name, op in vars(ops).items() if isinstance(op, type) and issubclass(op, te.ops.FusibleOperation)
    }
    more = set[str]()
    for name in classes:
        theirs, ours = (inspect.signature(getattr(room, name)).parameters for room in (te.ops, ops))
        added = ours.keys() - theirs.keys() - {"kwargs"}
        assert len(added) == (2 if name == "GroupedLinear" else 3), name
        more |= added
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == more


def test_every_reason_that_a_report_can_give_is_explained() -> None:
    rows = _rows("docs/offloading.md", "| fate | reason | when |")
    explained = {(fate, reason) for fate, reason, when in rows if when}
    assert {fate for fate, _ in explained} == {fate.value for fate in Fate}
    assert {reason for _, reason in explained} == {reason.value for reason in Reason}
