"""Tables of costs: their validation and their files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plugins.tuning import AxisCosts, CollectiveCost, Costs
from tests._internals import LoopbackCommunicator, measure_collective

COST = CollectiveCost(2e-5, 5e10, per_rank=1e-7)
AXIS = AxisCosts(COST, COST, CollectiveCost(4e-5, 5e10))


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["latency", "per_rank", "bandwidth"])
def test_costs_are_finite_and_not_negative(name: str, value: float) -> None:
    wanted = "positive and finite" if name == "bandwidth" else "finite and at least 0"
    with pytest.raises(ConfigurationError, match=f"^the {name} of costs must be {wanted}, not {value}"):
        CollectiveCost(**{"latency": 0.0, "bandwidth": 1.0, name: value})


def test_a_bandwidth_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^the bandwidth of costs must be positive and finite, not 0"):
        CollectiveCost(0.0, 0.0)
    with pytest.raises(ConfigurationError, match=r"^the copy_bandwidth of costs must be positive and finite, not 0"):
        Costs({"": AXIS}, copy_bandwidth=0.0)


def test_other_types_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^the latency of costs must be finite and at least 0, not '1'\.$"):
        CollectiveCost("1", 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^the costs of all_reduce must be a CollectiveCost, not 3\.$"):
        AxisCosts(COST, COST, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^the costs of mesh axis 'dp' must be AxisCosts, not 3\.$"):
        Costs({"dp": 3})  # type: ignore[dict-item]


def test_a_negative_time_names_its_group() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^the time of 'layers\.0' of costs must be finite and at least 0, not -1"
    ):
        Costs({"": AXIS}, forward={"layers.0": -1.0})


def test_the_time_grows_with_bytes_ranks_and_messages() -> None:
    assert COST.seconds(0, 1) == 0.0
    assert COST.seconds(0, 2) == pytest.approx(2.01e-5)
    assert COST.seconds(10**9, 101) == pytest.approx(2e-5 + 1e-5 + 10**9 * 100 / 101 / 5e10)
    assert COST.seconds(0, 2, messages=3) == pytest.approx(3 * 2.01e-5)


def test_an_axis_without_costs_uses_those_of_all_other_axes() -> None:
    other = AxisCosts(COST, COST, COST)
    assert Costs({"dp": AXIS, "": other}).axis("dp") is AXIS
    assert Costs({"dp": AXIS, "": other}).axis("ep") is other
    message = "these costs (given) have the mesh axes ['dp'], but not 'ep'. Add it, or costs for all other axes"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}"):
        Costs({"dp": AXIS}).axis("ep")


@given(st.floats(0, 1), st.floats(1, 1e12), st.none() | st.floats(1, 1e13), st.dictionaries(st.text(), st.floats(0, 1)))
def test_a_table_survives_its_file(
    latency: float, bandwidth: float, copy_bandwidth: float | None, times: dict[str, float]
) -> None:
    cost = CollectiveCost(latency, bandwidth)
    costs = Costs({"dp": AxisCosts(cost, cost, COST)}, times, times, copy_bandwidth, "a test")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        costs.save(path)
        assert Costs.load(path) == costs


def test_a_file_of_a_version_that_measured_activations_is_read(tmp_path: Path) -> None:
    path, costs = tmp_path / "costs.json", Costs({"dp": AXIS}, source="a test")
    costs.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "activations": [["layers.0", 1, 300, 200]]}))
    assert Costs.load(path) == costs


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"axes": {"dp": {}}}', '{"axes": {"dp": {"all_gather": 1}}}'])
def test_a_file_without_a_table_is_refused_with_its_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(
        ConfigurationError, match=f"^{re.escape(str(path))} has no table of costs: .*Write one with Costs"
    ):
        Costs.load(path)


@pytest.mark.parametrize(
    ("large", "seconds"), [(1.2e-3, 1e-3), (1.9e-4, 1.9e-6), (2e-4, 2e-6)], ids=["longer", "shorter", "equal"]
)
def test_a_difference_within_noise_gives_no_absurd_bandwidth(large: float, seconds: float) -> None:
    clock = Mock(device=torch.device("cpu"))
    clock.time.side_effect = [1.0, 2e-4, 2e-4, 1.0, large, large]  # the first of each size is not counted
    cost = measure_collective(LoopbackCommunicator(size=2), "all_reduce", [1 << 12, 1 << 20], clock)
    assert cost.bandwidth == pytest.approx(((1 << 19) - (1 << 11)) / seconds)
    assert 0 < cost.latency < 2e-4
