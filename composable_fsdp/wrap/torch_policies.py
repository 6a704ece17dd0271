"""Policies of ``torch.distributed.fsdp.wrap`` as ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from composable_fsdp.wrap._plan import Chosen, Policy, Scope
from composable_fsdp.wrap.wrap_policy import as_policy, by_class


def as_wrap_policy(policy: object) -> Policy:
    """Return our policy for one of ours or torch's.

    Torch's are ``ModuleWrapPolicy``, ``CustomPolicy``, and functions such as ``size_based_auto_wrap_policy`` or
    partials of them.
    """
    if isinstance(policy, torch_wrap.ModuleWrapPolicy):
        return by_class(*policy._module_classes)
    if isinstance(policy, torch_wrap.CustomPolicy):
        return as_policy(_as_predicate(policy._lambda_fn))
    if callable(policy) and _takes_remainder(policy):
        return Policy(partial(_by_auto_wrap, policy))
    return as_policy(policy)


def _as_predicate(choose: Callable[[nn.Module], Any]) -> Callable[[nn.Module, str], Any]:
    """Return ``choose`` with torch's keyword ``sharding_strategy`` renamed. In torch an empty dict chooses nothing."""

    def predicate(module: nn.Module, _: str) -> Any:
        answer = choose(module)
        if not isinstance(answer, Mapping):
            return answer
        return {"strategy" if key == "sharding_strategy" else key: value for key, value in answer.items()} or False

    return predicate


def _takes_remainder(policy: Callable[..., Any]) -> bool:
    try:
        return "nonwrapped_numel" in inspect.signature(policy).parameters
    except ValueError:  # some builtins have none
        return False


def _by_auto_wrap(function: Callable[..., Any], scope: Scope) -> Chosen:
    """Choose by a function ``(module, recurse, nonwrapped_numel) -> bool``.

    With ``recurse=True`` the function returns whether to visit the children of a module with so many parameters. It is
    called again with ``recurse=False`` and the number of parameters that no chosen module below has, and returns
    whether to choose the module.
    """
    chosen: Chosen = {}
    _visit(scope.model, function, scope, set(), chosen)
    return chosen


def _visit(
    module: nn.Module, function: Callable[..., Any], scope: Scope, taken: set[nn.Parameter], chosen: Chosen
) -> None:
    own = scope.parameters(module)
    if function(module=module, recurse=True, nonwrapped_numel=_numel(own, taken)):
        for child in module.children():
            _visit(child, function, scope, taken, chosen)
    left = _numel(own, taken)
    if function(module=module, recurse=False, nonwrapped_numel=left) and module in scope.modules and left:
        taken.update(own)
        chosen[module] = {}


def _numel(parameters: list[nn.Parameter], taken: set[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if p not in taken)
