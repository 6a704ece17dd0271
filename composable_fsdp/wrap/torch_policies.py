"""Policies of ``torch.distributed.fsdp.wrap`` as ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.wrap._plan import Policy
from composable_fsdp.wrap.wrap_policy import as_policy, by_class


def as_wrap_policy(policy: object) -> Policy:
    """Return our policy for one of ours, or for torch's ``ModuleWrapPolicy`` or ``CustomPolicy``.

    Raises:
        ConfigurationError: ``policy`` is a function of torch that counts parameters, such as
            ``size_based_auto_wrap_policy``, or none.
    """
    if isinstance(policy, torch_wrap.ModuleWrapPolicy):
        return by_class(*policy._module_classes)
    if isinstance(policy, torch_wrap.CustomPolicy):
        return as_policy(_as_predicate(policy._lambda_fn))
    function = getattr(policy, "func", policy)  # of a partial
    if getattr(function, "__module__", None) == torch_wrap.__name__:
        raise ConfigurationError(
            f"policy= does not take {getattr(function, '__name__', function)} of FSDP1. Pass module classes, "
            "policy={Block}; a function of a module and its name; or wrap.by_size(min_parameters)."
        )
    return as_policy(policy)


def _as_predicate(choose: Callable[[nn.Module], Any]) -> Callable[[nn.Module, str], Any]:
    """Return ``choose`` with torch's keyword ``sharding_strategy`` renamed. In torch an empty dict chooses nothing."""

    def predicate(module: nn.Module, _: str) -> Any:
        answer = choose(module)
        if not isinstance(answer, Mapping):
            return answer
        return {"strategy" if key == "sharding_strategy" else key: value for key, value in answer.items()} or False

    return predicate
