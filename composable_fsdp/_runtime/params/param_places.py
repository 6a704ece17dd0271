"""The modules and attributes under which parameters and buffers are registered."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

__all__ = ["ParamPlace", "registered_buffers", "registered_parameters"]


@dataclass(eq=False)
class ParamPlace:
    """A parameter, its first qualified name, and every (module, attribute) under which it is registered."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def current(self) -> object:
        """Return the attribute at the first place, or ``None`` if there is none."""
        module, attribute = self.places[0]
        return getattr(module, attribute, None)

    def put(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` at all places; the order of a module's parameters stays."""
        for module, attribute in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__ and attribute in module._parameters:
                module._parameters[attribute] = parameter
            else:  # the class overrides __setattr__, as nn.LSTM, or the attribute was deleted or replaced
                vars(module).pop(attribute, None)
                setattr(module, attribute, parameter)


def registered_parameters(module: nn.Module) -> list[ParamPlace]:
    """Return the places of each parameter of ``module`` and its submodules."""
    found: dict[int, ParamPlace] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                name = f"{path}.{attribute}" if path else attribute
                found.setdefault(id(parameter), ParamPlace(name, parameter)).places.append((owner, attribute))
    return list(found.values())


def registered_buffers(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the (module, attribute) pairs of each buffer of ``module`` and its submodules."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), []).append((owner, name))
    return list(places.values())
