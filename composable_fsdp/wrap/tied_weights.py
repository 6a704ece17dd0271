"""Tied weights between groups, such as an embedding's weight that the output head shares.

The group that is made first owns them. When a later group that uses them is unsharded, so is the owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from composable_fsdp._core.state import TIED_ATTRIBUTE, find_state
from composable_fsdp.errors import ConfigurationError


def tie_groups(modules: Sequence[nn.Module]) -> None:
    """Declare that ``modules`` share parameters, so that each may be in another group.

    Call it before ``fully_shard``; later calls then need no ``shared_from``. The parameters belong to the first group
    that is made of one of the modules, or of a module that contains it. They are unsharded along with the other groups.
    With ``policy=`` this call is not needed.

    Args:
        modules: two or more modules, each of which shares a parameter with another, for example ``[embedding, head]``.

    Raises:
        ConfigurationError: a module shares nothing with the others, or is sharded already.
    """
    if len(modules) < 2 or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigurationError("tie_groups takes a list of two or more modules that share parameters.")
    for module in modules:
        if any(find_state(below) is not None for below in module.modules()):
            name = type(module).__name__.removeprefix("FSDP")
            raise ConfigurationError(
                f"tie_groups: this {name} has been sharded already. Call it before fully_shard, or name the module "
                "that owns the parameters: fully_shard(..., shared_from=[owner])."
            )
    held = [{id(p) for p in module.parameters()} for module in modules]
    for index, module in enumerate(modules):
        if not held[index] & set[int]().union(*held[:index], *held[index + 1 :]):
            raise ConfigurationError(
                f"tie_groups: this {type(module).__name__} shares no parameter with the others. Tie them first, for "
                "example head.weight = embedding.weight."
            )
    for module in modules:
        vars(module)[TIED_ATTRIBUTE] = True
