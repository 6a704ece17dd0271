"""The bar that rank 0 shows."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec

import pytest

from tests._internals import progress_bar, wants_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.skipif(find_spec("rich") is None, reason="needs rich: pip install '.[cli]'")
def test_a_terminal_shows_a_bar_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for stderr, asked, expected in ((Terminal(), None, True), (Terminal(), False, False), (io.StringIO(), None, False)):
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress_bar(wants_progress(asked), "loading", 4_000_000) as advance:
            advance(1_000_000)
        assert ("1.0/4.0 MB" in stderr.getvalue()) == expected
