"""The table of features names a test for each row; each of them must be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", (ROOT / "docs/features.md").read_text(), re.M)
TESTS = [row for row in ROWS if row[2] not in ("test", "---")]


def test_each_row_says_what_happens() -> None:
    assert len(TESTS) > 60
    for feature, verdict, _ in TESTS:
        assert re.match(r"works$|works, with a note: |refused", verdict), (feature, verdict)


@pytest.mark.parametrize("name", sorted({test for _, _, test in TESTS}))
def test_the_test_of_a_feature_is_there(name: str) -> None:
    match = re.fullmatch(r"`([\w/]+\.py)::(\w+)(?:\[(.+)\])?`", name)
    assert match, name
    path, function, case = match.groups()
    file = ROOT / "tests" / path
    assert f"def {function}(" in file.read_text()
    if case is not None:
        # Cases are named here or in the module that the tiers run.
        texts = [x.read_text() for x in (file, *file.parent.glob("*_cases.py"))]
        names = [case, re.sub(r"^precision .*", "precision {precision}", case)]
        assert any(f'"{x}"' in text for x in names for text in texts), case
