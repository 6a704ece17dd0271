"""Where parameters and buffers are registered on modules: each once, however many names it has."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

__all__ = ["ParamPlace", "registered_buffers", "registered_parameters"]


@dataclass
class ParamPlace:
    """A parameter, its first full name, and all (module, attribute) under which it is known."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def current(self) -> object:
        """What is at the first place now; ``None`` if nothing is."""
        module, attribute = self.places[0]
        return getattr(module, attribute, None)

    def put(self, parameter: nn.Parameter) -> None:
        """Registers ``parameter`` at all places, in the order that they had."""
        for module, attribute in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__ and attribute in module._parameters:
                module._parameters[attribute] = parameter
            else:  # a class that wants to see it, such as nn.LSTM; or what was there has been deleted or replaced
                vars(module).pop(attribute, None)
                setattr(module, attribute, parameter)


def registered_parameters(module: nn.Module) -> list[ParamPlace]:
    """All parameters of ``module`` and of modules below it."""
    found: dict[int, ParamPlace] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                name = f"{path}.{attribute}" if path else attribute
                found.setdefault(id(parameter), ParamPlace(name, parameter)).places.append((owner, attribute))
    return list(found.values())


def registered_buffers(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each buffer of ``module`` and of modules below it."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), []).append((owner, name))
    return list(places.values())
