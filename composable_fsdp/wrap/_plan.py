"""The plan of a policy: which modules of a model become groups, and with which options. Changes nothing.

A policy gets a :class:`Scope`, which has the modules to choose from, and returns those that become groups, each with
options of its own. ``fully_shard(model, policy=...)`` then makes a group of each, inner ones first.

Invariants of a plan: the last group is that of the model itself; a module that is used within several groups has one of
its own; every option is one that a group may override.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from composable_fsdp._core.state import find_state
from composable_fsdp.errors import ConfigurationError

READ_WITHOUT_CALLS = (nn.MultiheadAttention,)
"""Classes that compute with parameters of modules below them without calling these modules."""

Chosen = dict[nn.Module, Mapping[str, object]]
"""Modules that become groups, with keywords of ``fully_shard`` for each, in place of those of the call."""


class Group(NamedTuple):
    """A module to shard as a group, its name in the model, and its keywords. The name of the model itself is empty."""

    module: nn.Module
    name: str
    overrides: Mapping[str, object]


@dataclass(frozen=True)
class Policy:
    """A policy of :mod:`composable_fsdp.wrap`: ``choose`` returns modules of a scope that become groups."""

    choose: Callable[[Scope], Chosen]


class Scope:
    """The modules that a policy may choose from: those that are called and have parameters in no group yet.

    It excludes ignored and sharded modules with all modules below them. It also excludes the modules below
    ``nn.MultiheadAttention``, which reads parameters without calling their modules.

    Args:
        model: the outermost module.
        ignored_modules: ids of modules to exclude.
        ignored_parameters: ids of parameters that do not count.
    """

    def __init__(
        self, model: nn.Module, ignored_modules: Collection[int] = (), ignored_parameters: Collection[int] = ()
    ) -> None:
        self.model = model
        states = (state for module in model.modules() if (state := find_state(module)) is not None)
        self._managed = {id(p) for state in states for p in state.registered_parameters()} | set(ignored_parameters)
        self._ignored = ignored_modules
        self.modules = {
            module: name
            for name, module in self._bottom_up(model, "", set())
            if getattr(module.forward, "__func__", None) is not nn.Module.forward and self.parameters(module)
        }
        """Name by module, bottom up, otherwise in the order of registration."""

    def _bottom_up(self, module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules bottom up: a module comes before all that contain it, even if it is registered twice."""
        seen.add(module)
        if not isinstance(module, READ_WITHOUT_CALLS):
            for attribute, child in module.named_children():
                if child not in seen and id(child) not in self._ignored and find_state(child) is None:
                    yield from self._bottom_up(child, f"{name}.{attribute}" if name else attribute, seen)
        yield name, module

    def parameters(self, module: nn.Module, *, recurse: bool = True) -> list[nn.Parameter]:
        """Return the parameters of ``module`` that are neither in a group nor ignored, each once."""
        return [p for p in module.parameters(recurse) if id(p) not in self._managed]

    def numel(self, module: nn.Module) -> int:
        return sum(p.numel() for p in self.parameters(module))


def plan_groups(policy: Policy, scope: Scope, options: Collection[str]) -> list[Group]:
    """Return all groups that ``policy`` chooses, inner ones before those that contain them, and the model's own last.

    Args:
        policy: the policy of the user.
        scope: the modules to choose from.
        options: names of keywords that groups may override.

    Raises:
        ConfigurationError: the policy chose unknown options.
    """
    chosen = policy.choose(scope)
    while (shared := _used_in_several(scope, chosen)) is not None:
        chosen[shared] = {}
    names = scope.modules | {scope.model: ""}
    groups = [Group(m, name, chosen.get(m, {})) for m, name in names.items() if m in chosen or m is scope.model]
    for group in groups:
        if unknown := sorted(group.overrides.keys() - set(options)):
            raise ConfigurationError(
                f"the policy gave {group.name or 'the model'!r} {', '.join(map(repr, unknown))}, which a group cannot "
                f"have of its own. It may have {', '.join(sorted(options))}."
            )
    return groups


def _used_in_several(scope: Scope, chosen: Collection[nn.Module]) -> nn.Module | None:
    """Return the outermost module that is in several groups and has no group of its own.

    A call of it in one group would find parameters that another group has sharded.
    """
    groups_of: dict[nn.Module, set[nn.Module]] = {}
    visits = [(scope.model, scope.model)]  # not recursive: a nested function would own itself, and the modules with it
    while visits:
        module, group = visits.pop()
        group = module if module in chosen else group
        groups_of.setdefault(module, set()).add(group)
        visits += [(child, group) for child in module.children()]
    several = [module for module in scope.modules if len(groups_of.get(module, ())) > 1]
    return several[-1] if several else None
