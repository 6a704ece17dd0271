"""A model without references is freed without the garbage collector, also on several ranks."""

from __future__ import annotations

import pytest

from tests.helpers.dropped_models import CASES, remaining_objects
from tests.helpers.run_ranks import run_ranks
from tests.helpers.transports import TRANSPORTS


def survivors_by_case() -> dict[str, list[str]]:
    return {name: remaining_objects(case) for name, case in CASES.items()}


@pytest.mark.behaviour("C-03")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dropped_model_is_freed_without_the_garbage_collector(transport: str) -> None:
    for found in run_ranks(survivors_by_case, 2, environment=TRANSPORTS[transport]):
        assert found == {name: [] for name in CASES}
