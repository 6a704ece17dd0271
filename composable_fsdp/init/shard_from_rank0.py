"""``shard_from_rank0``: shard a model whose values only one rank has, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._api.extents import plain_name, shardings_of, states_below
from composable_fsdp._api.fully_shard import fully_shard
from composable_fsdp._consistency.verify_ranks import verify_same_lines
from composable_fsdp._core.buckets import registered_buffers, registered_parameters
from composable_fsdp._core.params import as_parameter, has_grad_dtype, parameter_class
from composable_fsdp.checkpoint._coordination import tensor_text
from composable_fsdp.checkpoint._state_dict.model import Full, OwnerRanks, fill
from composable_fsdp.errors import ConfigurationError, ParameterError
from composable_fsdp.init.materialize import allocate_at_rest

__all__ = ["shard_from_rank0"]

M = TypeVar("M", bound=nn.Module)


def shard_from_rank0(model: M, shard: Callable[..., object] = fully_shard, **options: Any) -> M:
    """Shard a ``model`` that has values on rank 0 and was built on the meta device on all other ranks.

    Every rank calls ``shard(model, **options)`` with the model on meta. Rank 0 then broadcasts parameters and buffers
    one by one, and each rank keeps its shards. So other ranks never hold more than their shards and one full tensor.
    Rank 0 frees each tensor after sending it, unless something else refers to it. Shared tensors stay shared. Buffers
    that are not persistent are sent too; gradients and extra state of modules are not. All ranks must call it together.

    Args:
        model: not sharded yet, with plain parameters. Rank 0 is the first rank of the largest mesh that ``shard``
            uses; for parameters on a smaller data-parallel mesh, such as experts, it is the first rank of that mesh.
        shard: calls ``fully_shard`` on the model or on parts of it, and ``parallelize_module`` and the like before.
        options: keywords for ``shard``: ``shard_from_rank0(model, mesh=mesh)`` calls ``fully_shard(model, mesh=mesh)``.

    Returns:
        ``model``, on the devices of its mesh. Ignored parameters and buffers have rank 0's values too.

    Raises:
        ConfigurationError: the model is sharded or has DTensors already, or ``shard`` did not shard it.
        DivergenceError: ranks differ in names, shapes or dtypes. Raised on all ranks, with the same text.
        ParameterError: rank 0 lacks values, or another rank has some. Raised on all ranks, with the same text. The
            model stays on meta.
    """
    _check_plain(model)
    values = _take_values(model)
    shard(model, **options)
    states = states_below(model)
    if not states:
        raise ConfigurationError(
            f"shard_from_rank0 called a function that sharded nothing in {type(model).__name__}: it must call "
            "fully_shard on the model or on modules in it."
        )
    owners = _verify(model, values)
    allocate_at_rest(model, states)
    shardings = shardings_of(states)
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in _tensors(model):
            value = values.pop(name, None)
            fill(tensor, shardings.get(id(tensor)), owners.send(tensor, value, tensor.dtype, tensor.shape), Full())
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


def _take_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move ``model`` to meta and return its values by name, so that all ranks continue alike."""
    values = {plain_name(name): tensor.detach() for name, tensor in _tensors(model) if not tensor.is_meta}
    for parameter in registered_parameters(model):
        real = parameter.parameter
        blank = as_parameter(real.detach().to("meta"), parameter_class(real), real.requires_grad)
        vars(blank).update(vars(real))
        if has_grad_dtype(real):
            blank.grad_dtype = real.grad_dtype
        parameter.put(blank)
    for places in registered_buffers(model):
        (owner, attribute), *_ = places
        buffer = owner.get_buffer(attribute).to("meta")
        for module, name in places:
            module._buffers[name] = buffer
    return values


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers with their first names, each once."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield plain_name(name), tensor


# -- verification across ranks


class _RankTensors(NamedTuple):
    """Lines with the tensors that one rank was given, those that it lacks but sends, and has but another rank sends."""

    lines: list[str]
    missing: list[str]
    surplus: list[str]


def _verify(model: nn.Module, values: dict[str, torch.Tensor]) -> OwnerRanks:
    """Check on all ranks that the model can be sent, and return the ranks that send each tensor."""
    shardings = shardings_of(states_below(model))
    tensors = dict(_tensors(model))
    owners = OwnerRanks.of(((t, shardings.get(id(t))) for t in tensors.values()), only_sources=True)
    own = {name for name, tensor in tensors.items() if owners.provides(tensor)}
    report = _RankTensors(
        [f"{name}: {tensor_text(tensor.dtype, tensor.shape)}" for name, tensor in tensors.items()],
        sorted(own - values.keys()),
        [n for n, tensor in tensors.items() if n in values and n not in own and isinstance(tensor, nn.Parameter)],
    )
    reports = owners.exchange(report)
    verify_same_lines("what was given to shard_from_rank0", {rank: each.lines for rank, each in reports.items()})
    for rank, each in reports.items():
        if each.missing:
            raise ParameterError(
                f"shard_from_rank0 sends what rank {rank} has, but there these are on meta and have no values: "
                f"{each.missing}."
            )
        if each.surplus:
            raise ParameterError(
                f"shard_from_rank0 sends what the first rank has, but these have values on rank {rank} too: "
                f"{each.surplus}. Build the model on meta on all ranks but the first (with torch.device('meta')); if "
                "every rank is to build it with values, call fully_shard(..., sync_module_states=True)."
            )
    return owners
