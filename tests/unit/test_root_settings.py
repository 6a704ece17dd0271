"""Settings that apply to all groups of a root are checked in the first forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard, no_sync
from composable_fsdp.errors import ConfigurationError, LifecycleError
from tests._internals import _MOST_FORWARDS, root_of, state_of
from tests.helpers.models import Chain
from tests.helpers.sharding import sharded

pytestmark = [pytest.mark.behaviour("B-04"), pytest.mark.usefixtures("one_rank")]


def onto_meta(layer: Any) -> None:
    group = state_of(layer).group
    group.axes = replace(group.axes, device=torch.device("meta"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda layer: layer.set_order_check("off"),
            "the order check of 'layers.1' (Linear) is off, but that of 'root' (Chain), which contains it, is first, "
            "and one counts for all. Call set_order_check on the root only.",
        ),
        *(
            (
                lambda layer, name=name, value=value: layer.set_schedule(**{name: value}),
                f"the {name} of 'layers.1' (Linear) is {value}, but that of 'root' (Chain), which contains it, is "
                "None, and one counts for all. Call set_schedule on the root only.",
            )
            for name, value in (("max_unsharded_bytes", 0), ("prefetch_limit", 3), ("max_fused_bytes", 7))
        ),
        (
            onto_meta,
            "the device of 'layers.1' (Linear) is meta, but that of 'root' (Chain), which contains it, is cpu, and one "
            "counts for all. Give all of them meshes of one device type.",
        ),
    ],
)
def test_the_first_forward_names_both_modules_and_values(change: Callable[[Any], object], text: str) -> None:
    model = fully_shard(Chain(), policy={nn.Linear})
    change(model.layers[1])
    with pytest.raises(ConfigurationError) as caught:
        model(torch.ones(1, 8))
    assert str(caught.value) == text


@pytest.mark.parametrize("choice", ["prefetch_limit", "max_unsharded_bytes", "max_fused_bytes"])
def test_inner_modules_refuse_root_settings_after_the_first_forward(choice: str) -> None:
    model = fully_shard(Chain(), policy={nn.Linear})
    model(torch.ones(1, 8)).sum().backward()
    before = getattr(state_of(model.layers[1]).options, choice)
    given: dict[str, Any] = {choice: 7}
    with pytest.raises(ConfigurationError, match=rf"the {choice} of 'layers\.1' .* is 7, .*Call set_schedule on"):
        sharded(model.layers[1]).set_schedule(**given)
    assert getattr(state_of(model.layers[1]).options, choice) == before
    sharded(model).set_schedule(**given)
    model(torch.ones(1, 8)).sum().backward()


def test_settings_that_move_parameters_are_refused_between_forward_and_backward() -> None:
    model = fully_shard(Chain(), policy={nn.Linear})
    output = model(torch.ones(1, 8)).sum()
    for change in (
        lambda: sharded(model).set_reduce_scatter_unused_params(True),
        lambda: sharded(model.layers[0]).set_custom_all_gather(object()),
        lambda: sharded(model.layers[0]).set_custom_reduce_scatter(object()),
    ):
        with pytest.raises(LifecycleError, match=r"would move parameters of 'layers\.0'.*after the backward"):
            change()
    output.backward()
    sharded(model).set_reduce_scatter_unused_params(True)
    model(torch.ones(1, 8))
    with pytest.raises(LifecycleError, match="reset_iter_state"):
        sharded(model).set_reduce_scatter_unused_params(False)
    sharded(model).reset_iter_state()
    sharded(model).set_reduce_scatter_unused_params(False)
    model(torch.ones(1, 8)).sum().backward()


def test_settings_that_move_parameters_are_allowed_after_the_last_backward() -> None:
    model = fully_shard(Chain(), policy={nn.Linear})
    model.layers[0].requires_grad_(False)
    model(torch.ones(1, 8)).sum().backward()  # backward does not reach the frozen layer
    sharded(model).set_reduce_scatter_unused_params(True)
    with torch.no_grad():
        model(torch.ones(1, 8))
    sharded(model).set_reduce_scatter_unused_params(False)
    model(torch.ones(1, 8)).sum().backward()
    model(torch.ones(1, 8))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    sharded(model).set_reduce_scatter_unused_params(True)


def test_root_settings_apply_to_all_groups_and_can_be_corrected() -> None:
    model = fully_shard(Chain(), policy={nn.Linear})
    root, layer = sharded(model), sharded(model.layers[0])
    root.set_order_check("always")
    root.set_schedule(max_unsharded_bytes=0, max_fused_bytes=0)
    layer.set_schedule(max_fused_bytes=5)
    with pytest.raises(ConfigurationError, match=r"the max_fused_bytes of 'layers\.0'"):
        model(torch.ones(1, 8))
    layer.set_schedule(max_fused_bytes=0)
    model(torch.ones(1, 8)).sum().backward()


def test_forwards_without_backward_are_dropped() -> None:
    model = fully_shard(Chain(), policy={nn.Linear})
    outputs = [model(torch.ones(1, 8)) for _ in range(_MOST_FORWARDS + 3)]
    forwards = root_of(state_of(model)).progress.forwards
    assert len(forwards) == _MOST_FORWARDS
    outputs[-1].sum().backward()
    assert len(forwards) == _MOST_FORWARDS - 1


def test_a_copy_has_groups_inside_where_the_original_has() -> None:
    model = copy.deepcopy(fully_shard(Chain(), policy={nn.Linear}))
    assert [state_of(each).has_nested_states for each in (model, *model.layers)] == [True, False, False, False, False]


def test_a_setter_replaces_the_options_of_a_state_if_it_changes_them() -> None:
    model = fully_shard(Chain(), policy={nn.Linear})
    layer, state = model.layers[0], state_of(model.layers[0])
    before = state.options
    sharded(model).set_requires_gradient_sync(True)
    sharded(layer).set_schedule(prefetch_limit=None)
    assert state.options is before, "nothing has changed"
    with no_sync(layer):
        sharded(layer).set_reshard_after_backward(False)
    assert state.options == replace(before, reshard_after_backward=False), "set inside, and kept"
    with pytest.raises(FrozenInstanceError):
        state.options.prefetch_limit = None  # type: ignore[misc]
