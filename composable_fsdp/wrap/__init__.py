"""Policies that choose which modules of a model become parameter groups."""

from typing import NoReturn

from composable_fsdp.wrap._plan import Policy
from composable_fsdp.wrap.wrap_policy import PolicyLike, Predicate, by_class, by_size, every_module, transformer_blocks

__all__ = [
    "Policy",
    "PolicyLike",
    "Predicate",
    "by_class",
    "by_size",
    "every_module",
    "transformer_blocks",
]


def __getattr__(name: str) -> NoReturn:
    from composable_fsdp._other_names import missing

    missing(__name__, name)
