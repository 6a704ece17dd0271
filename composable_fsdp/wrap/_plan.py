"""The plan of a policy: which modules of a model become groups, and with which options. Changes nothing.

A policy gets a :class:`Scope`, which has the modules to choose from, and returns a sequence of :class:`Group`.
:func:`plan_groups` checks and completes it; ``fully_shard(model, policy=...)`` then makes a group of each.

Invariants of a complete plan: no module is in two groups; no group comes after one that contains a module of it; the
last group is that of the model itself; a module that is used within several groups has one of its own; every option is
one that a group may override.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from composable_fsdp._core.state import find_state
from composable_fsdp.errors import ConfigurationError

READ_WITHOUT_CALLS = (nn.MultiheadAttention,)
"""Classes that compute with parameters of modules below them without calling these modules."""


@dataclass(frozen=True)
class Group:
    """Modules to shard as one group.

    Args:
        modules: usually one; several are sharded as a list.
        names: the name of each in the model, ``""`` for the model itself.
        overrides: keywords of ``fully_shard`` for this group, in place of those of the call.
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    overrides: Mapping[str, object] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return ", ".join(name or "the model itself" for name in self.names)


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

    def group(self, modules: Sequence[nn.Module], overrides: Mapping[str, object] | None = None) -> Group:
        """Return a group of ``modules``, which are in this scope."""
        return Group(tuple(modules), tuple(self.modules[module] for module in modules), dict(overrides or {}))


@runtime_checkable
class Policy(Protocol):
    """An object that decides which modules become groups."""

    def plan(self, scope: Scope) -> Sequence[Group]:
        """Return the groups, inner ones before those that contain them. The model's own may be omitted."""
        ...


def plan_groups(policy: Policy, scope: Scope, options: Collection[str]) -> list[Group]:
    """Return all groups that ``policy`` chooses, the model's own last.

    Args:
        policy: the policy of the user.
        scope: the modules to choose from.
        options: names of keywords that groups may override.

    Raises:
        ConfigurationError: the policy chose modules that cannot be a group, a wrong order, or unknown options.
    """
    groups = list(policy.plan(scope))
    chosen: dict[nn.Module, Group] = {}
    within: dict[nn.Module, Group] = {}
    for group in groups:
        _check_options(group, options)
        for module, name in zip(group.modules, group.names, strict=True):
            if module in chosen:
                raise ConfigurationError(f"the policy chose {name!r} twice.")
            if module in within:
                raise ConfigurationError(
                    f"the policy chose {name!r} after {within[module].label!r}, which contains it: inner groups come "
                    "first."
                )
            if module not in scope.modules and module is not scope.model:
                raise ConfigurationError(
                    f"the policy chose {name!r} ({type(module).__name__}), which cannot be a group: it has no forward "
                    "or no parameters to shard, or is ignored, sharded already or within such a module."
                )
        chosen.update(dict.fromkeys(group.modules, group))
        within.update((below, group) for m in group.modules for below in m.modules() if below is not m)
    if scope.model not in chosen:
        groups.append(Group((scope.model,), ("",)))
    elif len(chosen[scope.model].modules) > 1:
        raise ConfigurationError("the policy put the model itself into one group with modules in it.")
    while shared := _used_in_several(scope, groups):
        inside = [i for i, group in enumerate(groups) if any(m in set(shared.modules()) for m in group.modules)]
        groups.insert(max(inside, default=-1) + 1, scope.group([shared]))
    return groups


def _used_in_several(scope: Scope, groups: Sequence[Group]) -> nn.Module | None:
    """Return the outermost module that is in several groups and has no group of its own.

    A call of it in one group would find parameters that another group has sharded.
    """
    chosen = {module: group for group in groups for module in group.modules}
    groups_of: dict[nn.Module, set[int]] = {}
    visits = [(scope.model, groups[-1])]  # not recursive: a nested function would own itself, and the modules with it
    while visits:
        module, group = visits.pop()
        group = chosen.get(module, group)
        groups_of.setdefault(module, set()).add(id(group))
        visits += [(child, group) for child in module.children()]
    several = [module for module in scope.modules if len(groups_of.get(module, ())) > 1]
    return several[-1] if several else None


def _check_options(group: Group, options: Collection[str]) -> None:
    unknown = sorted(set(group.overrides) - set(options))
    if unknown:
        raise ConfigurationError(
            f"the policy gave {group.label!r} {', '.join(map(repr, unknown))}, which a group cannot have of its own. "
            f"It may have {', '.join(sorted(options))}."
        )
