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


_GONE = {
    "balanced": "use transformer_blocks() or by_size(min_parameters)",
    **dict.fromkeys(("Group", "Scope"), "a policy is a function of a module and its name, or one of this package"),
}


def __getattr__(name: str) -> NoReturn:
    if name in _GONE:  # an AttributeError would lose its text in ``from ... import``
        raise ImportError(f"wrap.{name} is gone: {_GONE[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
