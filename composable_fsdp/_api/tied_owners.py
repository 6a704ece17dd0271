"""The groups that own parameters which several modules share: the first group that takes one owns it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from composable_fsdp._core.params import find_replaced
from composable_fsdp._core.state import FSDPState, state_of_parameter

__all__ = ["TIED_ATTRIBUTE", "holders", "tied_owner_states"]

TIED_ATTRIBUTE = "_composable_fsdp_tied"
"""The attribute of modules that ``tie_groups`` was called on."""


def tied_owner_states(modules: Iterable[nn.Module]) -> list[FSDPState]:
    """Return the FSDP states that own weights of those of ``modules`` that ``tie_groups`` tied."""
    return holders(module for module in modules if vars(module).get(TIED_ATTRIBUTE))


def holders(modules: Iterable[nn.Module]) -> list[FSDPState]:
    """Return the FSDP states that sharded parameters of which ``modules``, or modules below them, have the original."""
    taken = [find_replaced(parameter) for module in modules for parameter in module.parameters()]
    states = (state_of_parameter(each.parameter()) for each in taken if each is not None)
    return list(dict.fromkeys(state for state in states if state is not None))
