"""Problems of several ranks as one error, and the bar that rank 0 shows."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from composable_fsdp.checkpoint.agreement import Ranks
from composable_fsdp.checkpoint.progress import progress_bar, wants_progress
from composable_fsdp.errors import CheckpointError, ConfigurationError


@pytest.fixture(name="told")
def _told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    """Makes the first of several ranks, of which the others have these problems."""

    def make(*others: object) -> Ranks:
        ranks = Ranks()
        monkeypatch.setattr(ranks, "gather", lambda own: [own, *others])
        return ranks

    return make


def test_one_text_of_all_ranks_is_said_once_and_keeps_its_type(told) -> None:
    with pytest.raises(ConfigurationError, match=r"^bad$"), told((ConfigurationError, "bad")).agreeing():
        raise ConfigurationError("bad")


def test_a_problem_elsewhere_is_raised_here(told) -> None:
    worse, bad = (CheckpointError, "worse"), (CheckpointError, "bad")
    with pytest.raises(CheckpointError, match=r"^rank 1, 3: worse\nrank 2: bad$"), told(worse, bad, worse).agreeing():
        pass


def test_what_is_not_ours_is_named_with_its_type_and_is_the_cause(told) -> None:
    with pytest.raises(CheckpointError, match=r"^rank 0: KeyError: 'x'$") as caught, told(None).agreeing():
        raise KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)


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
