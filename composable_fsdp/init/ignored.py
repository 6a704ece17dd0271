"""The parameters, modules and buffers that ``fully_shard`` leaves alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from composable_fsdp.errors import ConfigurationError

__all__ = ["Ignored", "find_ignored"]


class Ignored:
    """The ignored modules, parameters and buffers of a ``fully_shard`` call, by id.

    Args:
        parameters: the ignored parameters.
        modules: the ignored modules; everything in and below them is ignored too.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> None:
        self._alive = [*parameters, *modules]  # keeps their ids from being reused
        self.modules = {id(m) for ignored in modules for m in ignored.modules()}
        self.parameters = {id(p) for p in parameters} | {id(p) for m in modules for p in m.parameters()}
        self.buffers = {id(b) for m in modules for b in m.buffers()}


def find_ignored(
    called: Sequence[nn.Module], parameters: Iterable[nn.Parameter] | None, modules: Collection[nn.Module] | None
) -> Ignored:
    """Check ``ignored_params`` and ``ignored_modules`` of a ``fully_shard`` call on the modules ``called``.

    Raises:
        ConfigurationError: ``modules`` is not a collection of modules, or contains one of ``called`` or one above it.
    """
    modules = modules if modules is not None else ()
    if isinstance(modules, nn.Module):
        raise ConfigurationError(f"ignored_modules must be a set or list of modules, not one {type(modules).__name__}.")
    given: Collection[object] = modules
    others = sorted({type(m).__name__ for m in given if not isinstance(m, nn.Module)})
    if others:
        raise ConfigurationError(f"ignored_modules must contain modules only, not {', '.join(others)}.")
    ignored = Ignored(tuple(parameters or ()), tuple(modules))
    for module in called:
        if id(module) in ignored.modules:
            raise ConfigurationError(
                f"ignored_modules contains the {type(module).__name__} that fully_shard was called on, or one above "
                "it. Leave out the call, or name the modules below it that are to be ignored."
            )
    return ignored
