"""Policies for ``fully_shard(model, policy=...)``."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from composable_fsdp._core.state import find_state
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.wrap._plan import READ_WITHOUT_CALLS, Chosen, Policy, Scope

Predicate = Callable[[nn.Module, str], "bool | Mapping[str, object]"]
PolicyLike = Policy | Collection[type[nn.Module]] | Callable[..., Any]
"""The types of ``policy=``: a policy of ours or torch's, module classes, or a :data:`Predicate`."""

_STACKS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def as_policy(policy: object) -> Policy:
    """Return the policy for the ``policy=`` argument of the user.

    Raises:
        ConfigurationError: ``policy`` has none of the types of :data:`PolicyLike`.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and issubclass(policy, nn.Module):
        return by_class(policy)
    if isinstance(policy, (set, frozenset, list, tuple)):
        return by_class(*policy)
    if callable(policy):
        try:
            inspect.signature(policy).bind(None, "")
        except ValueError:  # some builtins have none
            pass
        except TypeError as error:
            raise ConfigurationError(
                f"policy= is called with a module and its name, which {policy!r} does not take: {error}. Call a "
                "function that makes a policy, such as transformer_blocks(); in place of one of FSDP1 that counts "
                "parameters pass wrap.by_size(min_parameters)."
            ) from error
        return Policy(partial(_by_predicate, policy))
    raise ConfigurationError(
        "policy must be module classes, a function of a module and its name, or one of composable_fsdp.wrap such as "
        f"transformer_blocks(), not {policy!r}."
    )


def by_class(*classes: type[nn.Module], **overrides: object) -> Policy:
    """Return a policy that makes a group of every module whose class is one of ``classes`` or derives from one.

    Args:
        classes: for example ``TransformerBlock``.
        overrides: keywords of ``fully_shard`` for these groups.

    Raises:
        ConfigurationError: an argument is no class; or, from ``fully_shard``, the model has no such module.
    """
    given: tuple[object, ...] = classes
    if others := [each for each in given if not isinstance(each, type)]:
        raise ConfigurationError(f"a policy of classes takes classes of modules, not {others}.")
    return Policy(partial(_by_class, classes, overrides))


def _by_class(classes: tuple[type[nn.Module], ...], overrides: Mapping[str, object], scope: Scope) -> Chosen:
    chosen: Chosen = {m: overrides for m in scope.modules if isinstance(m, classes)}
    if not chosen:
        present = sorted({type(m).__name__ for m in scope.modules})
        raise ConfigurationError(
            f"no module of this {type(scope.model).__name__} that can be a group is a "
            f"{' or '.join(c.__name__ for c in classes) or 'class, since none is named'}. "
            f"Those that can are of {', '.join(present)}."
        )
    return chosen


def _by_predicate(choose: Predicate, scope: Scope) -> Chosen:
    """Call ``choose`` for every module. For the model itself only the options in the answer matter."""
    chosen: Chosen = {}
    for module, name in scope.modules.items():
        answer: object = choose(module, name)
        if not isinstance(answer, (bool, Mapping)):
            raise ConfigurationError(
                f"the policy returned {answer!r} for {name!r} ({type(module).__name__}); it must return a bool, "
                "or keywords of fully_shard for that group as a dict."
            )
        if answer is not False:
            chosen[module] = answer if isinstance(answer, Mapping) else {}
    return chosen


def by_size(min_parameters: int) -> Policy:
    """Return a policy that makes a group of every module with ``min_parameters`` elements or more.

    Elements of the groups inside a module do not count.
    """
    return Policy(partial(_by_size, min_parameters))


def _by_size(min_parameters: int, scope: Scope) -> Chosen:
    chosen: Chosen = {}
    taken = set[nn.Parameter]()
    for module in scope.modules:
        left = [p for p in scope.parameters(module) if p not in taken]
        if sum(p.numel() for p in left) >= min_parameters:
            chosen[module] = {}
            taken.update(left)
    return chosen


def every_module() -> Policy:
    """Return a policy that makes a group of every module with parameters of its own: least memory, most collectives."""
    return Policy(_every_module)


def _every_module(scope: Scope) -> Chosen:
    return {
        module: {}
        for module in scope.modules
        if isinstance(module, READ_WITHOUT_CALLS) or scope.parameters(module, recurse=False)
    }


def transformer_blocks() -> Policy:
    """Return a policy that makes a group of every block of a model's repeated stacks, such as those of an encoder.

    A stack is a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with two or more modules of one class, in which
    parameters with at least half of the elements have the same shapes. So the stages of a vision model, which differ in
    width, are no stack, but the layers within each stage are. The blocks of a stack are all modules of such a class,
    and in a ``ModuleList`` those of other classes too. Modules within a block, such as experts, get no group.

    Raises:
        ConfigurationError: the model has no such stack; raised by ``fully_shard``.
    """
    return Policy(_transformer_blocks)


def _transformer_blocks(scope: Scope) -> Chosen:
    found: Chosen = {block: {} for stack in _stacks(scope.model, scope) for block in stack}
    if not found:
        raise ConfigurationError(
            f"transformer_blocks() found no repeated blocks in {type(scope.model).__name__}: no ModuleList, "
            "ModuleDict or Sequential in it has two modules of one class and of like shapes. "
            "Name their class: policy={BlockClass}; or use by_size(min_parameters)."
        )
    return found


def _stacks(module: nn.Module, scope: Scope) -> Iterator[list[nn.Module]]:
    """Yield the blocks of each stack below ``module``, outermost stacks only."""
    children = [child for child in module._modules.values() if child is not None]
    blocks: list[nn.Module] = []
    if isinstance(module, _STACKS):
        candidates = [child for child in children if child in scope.modules and not isinstance(child, _STACKS)]
        shapes = [(type(child), Counter(p.shape for p in scope.parameters(child))) for child in candidates]
        repeated = {
            kind
            for i, (kind, own) in enumerate(shapes)
            if any(kind is other and _have_similar_shapes(own, of_other) for other, of_other in shapes[:i])
        }
        takes_all = repeated and isinstance(module, nn.ModuleList)
        blocks = [child for child in candidates if takes_all or type(child) in repeated]
    if blocks:
        yield blocks
    for child in children:
        if child not in blocks and find_state(child) is None:
            yield from _stacks(child, scope)


def _have_similar_shapes(some: Counter[torch.Size], others: Counter[torch.Size]) -> bool:
    """Return whether parameters with at least half of the elements have the same shapes."""
    common, *whole = (sum(shape.numel() * count for shape, count in c.items()) for c in (some & others, some, others))
    return 2 * common >= max(whole)
