"""Policies that choose which modules of a model become parameter groups."""

from typing import NoReturn

from composable_fsdp.wrap._plan import Group, Policy, Scope
from composable_fsdp.wrap.wrap_policy import PolicyLike, Predicate, by_class, by_size, every_module, transformer_blocks

__all__ = [
    "Group",
    "Policy",
    "PolicyLike",
    "Predicate",
    "Scope",
    "by_class",
    "by_size",
    "every_module",
    "transformer_blocks",
]


def __getattr__(name: str) -> NoReturn:
    if name == "balanced":  # an AttributeError would lose its text in ``from ... import``
        raise ImportError("wrap.balanced is gone: use transformer_blocks() or by_size(min_parameters).")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
