"""Policies that choose which modules of a model become parameter groups, and tied weights between groups."""

from composable_fsdp.wrap._plan import Group, Policy, Scope
from composable_fsdp.wrap.wrap_policy import (
    PolicyLike,
    Predicate,
    balanced,
    by_class,
    by_size,
    every_module,
    transformer_blocks,
)

__all__ = [
    "Group",
    "Policy",
    "PolicyLike",
    "Predicate",
    "Scope",
    "balanced",
    "by_class",
    "by_size",
    "every_module",
    "transformer_blocks",
]
