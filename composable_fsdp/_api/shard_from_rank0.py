"""``shard_from_rank0``: a model whose values one rank has, shared out tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._api.fully_shard import fully_shard
from composable_fsdp._api.materialize import give_memory
from composable_fsdp._comm.verify_ranks import difference_text
from composable_fsdp._runtime.params.param_places import registered_buffers, registered_parameters
from composable_fsdp._runtime.params.tensor_subclass import as_parameter, parameter_class
from composable_fsdp._runtime.shard_extent import shardings_of, states_below
from composable_fsdp.checkpoint._coordination.mismatch import tensor_text
from composable_fsdp.checkpoint._state_dict.names import plain_name
from composable_fsdp.checkpoint._state_dict.options import Full
from composable_fsdp.checkpoint._state_dict.owners import OwnerRanks
from composable_fsdp.checkpoint._state_dict.tensor import fill
from composable_fsdp.errors import ConfigurationError, DivergenceError, ParameterError

__all__ = ["shard_from_rank0"]

M = TypeVar("M", bound=nn.Module)


def shard_from_rank0(model: M, shard: Callable[..., object] = fully_shard, **options: Any) -> M:
    """Shards a ``model`` that has values on rank 0 and was built on the meta device everywhere else.

    Every rank calls ``shard(model, **options)`` with the model on meta; then rank 0 sends parameters and buffers one by
    one, and each rank keeps its shards. So the others never hold more than these and one whole tensor, and what rank 0
    had is freed as it is sent, unless somebody else holds it. Shared tensors stay shared, and buffers that are not
    persistent come along; gradients and extra states of modules do not. All ranks must call it together.

    Args:
        model: not sharded yet, and with plain parameters. Rank 0 is the first rank of the largest mesh that ``shard``
            uses; for parameters that fewer data-parallel ranks hold than others, such as experts, it is the first of
            these.
        shard: calls ``fully_shard`` on the model or on parts of it, and before it ``parallelize_module`` and the like.
        options: for ``shard``: ``shard_from_rank0(model, mesh=mesh)`` calls ``fully_shard(model, mesh=mesh)``.

    Returns:
        ``model``, on the devices of its mesh. What was to be ignored has rank 0's values, too.

    Raises:
        ConfigurationError: the model is sharded or a DTensor already, or ``shard`` did not shard it.
        DivergenceError: ranks have other names, shapes or dtypes. On all ranks, with the same text.
        ParameterError: rank 0 lacks values, or another rank has some. On all ranks, with the same text. The model is
            left on meta.
    """
    _check_plain(model)
    values = _set_aside(model)
    shard(model, **options)
    states = states_below(model)
    if not states:
        raise ConfigurationError(
            f"shard_from_rank0 called a function that sharded nothing in {type(model).__name__}: it must call "
            "fully_shard on the model or on modules in it."
        )
    holders = _agree(model, values)
    homes = {id(p.sharded): state.group.tensors.rest_device for state in states for p in state.group.parameters}
    give_memory(model, lambda tensor: homes.get(id(tensor), states[0].group.axes.device))
    shardings = shardings_of(states)
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in _tensors(model):
            value = values.pop(name, None)
            fill(tensor, shardings.get(id(tensor)), holders.send(tensor, value, tensor.dtype, tensor.shape), Full())
    return model


def _check_plain(model: nn.Module) -> None:
    name = type(model).__name__.removeprefix("FSDP")
    if states_below(model):
        raise ConfigurationError(
            f"shard_from_rank0 was given {name} sharded already. Give it the model before fully_shard, which it calls "
            "itself; or fill this one by composable_fsdp.checkpoint.load_state_dict(..., broadcast_from_rank0=True)."
        )
    placed = [n for n, tensor in _tensors(model) if isinstance(tensor, DTensor)]
    if placed:
        raise ConfigurationError(
            f"shard_from_rank0 was given {name} with DTensors: {placed}. Place them in the function that it calls, "
            "before fully_shard: there all ranks have the model on meta."
        )


def _set_aside(model: nn.Module) -> dict[str, torch.Tensor]:
    """The values of ``model`` by their first names. It is left on meta, so that all ranks do the same from here on."""
    values = {plain_name(name): tensor.detach() for name, tensor in _tensors(model) if not tensor.is_meta}
    for parameter in registered_parameters(model):
        real = parameter.parameter
        blank = as_parameter(real.detach().to("meta"), parameter_class(real), real.requires_grad)
        vars(blank).update(vars(real))
        if real.grad_dtype != real.dtype:
            blank.grad_dtype = real.grad_dtype
        parameter.put(blank)
    for places in registered_buffers(model):
        (owner, attribute), *_ = places
        buffer = owner.get_buffer(attribute).to("meta")
        for module, name in places:
            module._buffers[name] = buffer
    return values


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by their first names, each once."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield plain_name(name), tensor


# -- what ranks must agree on


@dataclass(frozen=True)
class _Report:
    """What one rank was given.

    Attributes:
        lines: names, dtypes and shapes.
        lacks: names of which it is the source, and has no values.
        surplus: names of parameters that it has values of, though another rank is the source.
    """

    lines: list[str]
    lacks: list[str]
    surplus: list[str]


def _agree(model: nn.Module, values: dict[str, torch.Tensor]) -> OwnerRanks:
    """Those that share the model out, once it is clear that all can."""
    shardings = shardings_of(states_below(model))
    tensors = dict(_tensors(model))
    holders = OwnerRanks.of((t, shardings.get(id(t))) for t in tensors.values())
    own = {name for name, tensor in tensors.items() if holders.is_source_of(tensor)}
    report = _Report(
        [f"{name}: {tensor_text(tensor.dtype, tensor.shape)}" for name, tensor in tensors.items()],
        sorted(own - values.keys()),
        [n for n, tensor in tensors.items() if n in values and n not in own and isinstance(tensor, nn.Parameter)],
    )
    reports = holders.exchange(report)
    if len({tuple(each.lines) for each in reports.values()}) > 1:
        subject = "what was given to shard_from_rank0"
        raise DivergenceError(difference_text(subject, {rank: each.lines for rank, each in reports.items()}))
    for rank, each in reports.items():
        if each.lacks:
            raise ParameterError(
                f"shard_from_rank0 sends what rank {rank} has, but there these are on meta and have no values: "
                f"{each.lacks}."
            )
        if each.surplus:
            raise ParameterError(
                f"shard_from_rank0 sends what the first rank has, but these have values on rank {rank} too: "
                f"{each.surplus}. Build the model on meta on all ranks but the first (with torch.device('meta')); if "
                "every rank is to build it with values, call fully_shard(..., sync_module_states=True)."
            )
    return holders
