"""A model without references is freed by reference counts, without the garbage collector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.dropped_models import CASES, survivors
from tests.helpers.sharding import single_rank


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with single_rank():
        yield


@pytest.mark.behaviour("C-03")
@pytest.mark.parametrize("name", CASES)
def test_of_a_dropped_model_nothing_waits_for_the_garbage_collector(name: str) -> None:
    assert survivors(CASES[name]) == []
