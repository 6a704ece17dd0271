"""The page that compares with torch's FSDP2 is the one that its tests make."""

from __future__ import annotations

from tests.helpers.comparison.page import PAGE, render


def test_the_page_is_made_from_the_rows() -> None:
    assert PAGE.read_text() == render(), "run: python -m tests.helpers.comparison.page"
