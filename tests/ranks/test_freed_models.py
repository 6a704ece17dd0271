"""A model without references is freed without the garbage collector, also on several ranks."""

from __future__ import annotations

import pytest

from tests.helpers.dropped_models import CASES, remaining_objects
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import TRANSPORTS


@pytest.mark.behaviour("C-03")
@on_ranks(2, transports=TRANSPORTS)
def test_a_dropped_model_is_freed_without_the_garbage_collector() -> None:
    assert {name: remaining_objects(case) for name, case in CASES.items()} == {name: [] for name in CASES}
