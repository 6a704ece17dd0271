"""Find the parameters that a ``fully_shard`` call takes, and how each is sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composable_fsdp._api.torch_types import ParameterPlacement, as_placement
from composable_fsdp._core.full_mesh import FullMesh, named_data_parallel_axes, shard_over_full_mesh
from composable_fsdp._core.memory import is_accelerator
from composable_fsdp._core.mesh import DataParallelAxes, ParameterSharding, data_parallel_axes, shard_over_axes
from composable_fsdp._core.params import ParameterSource, ShardedParameter, find_replaced, local_part
from composable_fsdp._core.state import FSDPState, find_state, state_of_parameter
from composable_fsdp.errors import ConfigurationError, ParameterError, ShardDimError
from composable_fsdp.policies import MixedPrecisionPolicy, OffloadPolicy

__all__ = ["ParamDiscovery", "PlacementFunction", "holders", "offloads_of", "on_other_accelerators"]

PlacementFunction = Callable[[nn.Parameter], object]


def offloads_of(given: OffloadPolicy | Mapping[str, OffloadPolicy], names: Sequence[str]) -> dict[str, OffloadPolicy]:
    """Return the policy of each parameter of ``names``; raise if a name in a mapping is no parameter of the call."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ConfigurationError(
            f"offload_policy has {unknown}, which no parameter of this call is named. Names are those of "
            f"module.named_parameters(), without parameters that earlier calls took or that are ignored: {names}."
        )
    return {name: given.get(name, OffloadPolicy()) for name in names}


@dataclass
class ParamDiscovery:
    """Finds the parameters of one ``fully_shard`` call.

    Args:
        axes: the data-parallel axes of the call.
        full_mesh: the mesh that contains these axes, if ``dp_mesh_dims`` was given.
        placement_of: the user's ``shard_placement_fn``.
        ignored: ids of parameters to skip.
        device_given: True if the user named the device, so that parameters are moved there from any other device.
        owner_states: FSDP states whose parameters these modules may use too.
        communication: the codecs of the parameters; ``None`` if there are none.
        offload: the policy of all parameters, or those of parameters by name.
        precision: the policy of the call.
    """

    axes: DataParallelAxes
    full_mesh: FullMesh | None
    placement_of: PlacementFunction | None
    ignored: Collection[int]
    device_given: bool
    owner_states: Sequence[FSDPState]
    communication: Hashable | None
    offload: OffloadPolicy | Mapping[str, OffloadPolicy]
    precision: MixedPrecisionPolicy
    _axes_of: dict[tuple[DeviceMesh, str, float | None], DataParallelAxes] = field(default_factory=dict)
    _shared: list[tuple[FSDPState, ShardedParameter, tuple[nn.Module, str]]] = field(default_factory=list)
    """Parameters of other groups, with the places where they are not registered yet."""

    def collect(self, modules: Sequence[nn.Module]) -> list[ParameterSource]:
        """Return the parameters that the call takes, each once, with every place where it is registered."""
        named = _named_modules(modules)
        nested = _nested_parameters([owner for _, owner, _ in named])
        found: dict[int, tuple[str, str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for path, owner, top in named:
            for attribute, parameter in owner._parameters.items():
                if parameter is None or id(parameter) in self.ignored:
                    continue
                name = f"{path}.{attribute}" if path else attribute
                held = nested.get(id(parameter)) or self._find_shared(parameter)
                if held is not None:
                    self._note_shared(held, owner, attribute, f"{name!r} of {type(top).__name__}")
                    continue
                found.setdefault(id(parameter), (name, type(top).__name__, parameter, []))[3].append((owner, attribute))
        self._check_devices({name: parameter for name, _, parameter, _ in found.values()}, modules)
        offloads = offloads_of(self.offload, [name for name, *_ in found.values()])
        return [
            ParameterSource(
                name,
                parameter,
                tuple(owners),
                self._sharding(name, parameter, module_name),
                self.communication,
                offloads[name],
                self.precision.of_parameter(name, parameter),
            )
            for name, module_name, parameter, owners in found.values()
        ]

    def _check_devices(self, parameters: Mapping[str, nn.Parameter], modules: Sequence[nn.Module]) -> None:
        """Raise if a parameter is on another accelerator and the user did not name the device."""
        here = self.axes.device
        found = on_other_accelerators({name: parameter.device for name, parameter in parameters.items()}, here)
        if found and not self.device_given:
            raise ParameterError(
                f"these parameters of {', '.join(type(m).__name__ for m in modules)} are neither on CPU nor on {here}, "
                f"where this rank computes: {found}. Pass device={str(here)!r} to have them moved there; or make "
                "the device that they are on the current one, before the mesh is built."
            )

    def _find_shared(self, parameter: nn.Parameter) -> tuple[FSDPState, ShardedParameter] | None:
        """Return the state and parameter that replaced ``parameter``, if one of ``owner_states`` has sharded it."""
        taken = find_replaced(parameter)
        sharded = None if taken is None else taken.parameter()
        state = state_of_parameter(sharded)
        if sharded is None or state is None or state not in self.owner_states:
            return None
        return state, sharded

    def _note_shared(
        self, held: tuple[FSDPState, ShardedParameter], owner: nn.Module, attribute: str, place: str
    ) -> None:
        """Note one more place of a parameter of another group. Raises unless that is one of ``owner_states``."""
        state, parameter = held
        if (owner, attribute) in parameter.owners:
            return
        if state not in self.owner_states:
            raise _shared_error(place, f"{parameter.name!r} of {state.name}")
        self._shared.append((state, parameter, (owner, attribute)))

    def register_shared(self) -> None:
        """Register the parameters of other groups at the places that :meth:`collect` has found."""
        for state, parameter, place in self._shared:
            state.reshard()
            state.group.register_at(parameter, [place])

    def _sharding(self, name: str, parameter: nn.Parameter, module_name: str) -> ParameterSharding:
        """Check ``parameter`` and return how it is sharded."""
        self._check_available(name, parameter, module_name)
        placed = as_placement(self.placement_of(parameter) if self.placement_of else None, name)
        dim = resolve_dim(placed.shard.dim, local_part(parameter).shape, name)
        axes, full = self.axes, self.full_mesh
        if placed.mesh is not None:
            axes = self._own_axes(placed)
            full = None if placed.dims is None else FullMesh(placed.mesh, placed.dims, axes)
        if full is not None:
            return shard_over_full_mesh(name, parameter, full, dim)
        if getattr(parameter, "_local_type", None) and not isinstance(parameter, DTensor):
            raise ParameterError(
                f"parameter {name!r} of {module_name} has types of the package spmd_types, which need the mesh of all "
                "axes: without it, gradients that are partial over tensor-parallel ranks would not be summed, and a "
                "checkpoint would hold the part of one rank. Pass that mesh and "
                "dp_mesh_dims=DataParallelMeshDims(...), or the parameter in ignored_params."
            )
        return shard_over_axes(parameter, axes, dim)

    def _own_axes(self, placed: ParameterPlacement) -> DataParallelAxes:
        """Return the data-parallel axes of a parameter with a mesh of its own, the same for equal meshes."""
        mesh, dims = placed.mesh, placed.dims
        assert mesh is not None
        key = mesh, str(dims), placed.divide
        if key not in self._axes_of:
            axes = data_parallel_axes(mesh) if dims is None else named_data_parallel_axes(mesh, dims)
            self._axes_of[key] = replace(axes.on(self.axes.device), divide=placed.divide)
        return self._axes_of[key]

    def _check_available(self, name: str, parameter: nn.Parameter, module_name: str) -> None:
        """Raise if ``parameter`` belongs to another group or has no shape yet."""
        owner = state_of_parameter(parameter)
        if owner is not None:
            raise ConfigurationError(
                f"parameter {name!r} of {module_name} already belongs to the group of {owner.name!r}. fully_shard "
                f"works bottom-up: call it on {module_name} first, then on the {owner.class_name} that contains it."
            )
        taken = find_replaced(parameter)
        if taken is not None:
            raise _shared_error(f"{name!r} of {module_name}", taken.description)
        if is_lazy(parameter):
            raise ParameterError(
                f"parameter {name!r} of {module_name} has no shape yet, being part of a lazy module. Run a forward "
                "before fully_shard, so that the module learns its shapes."
            )


def _shared_error(place: str, other: str) -> ParameterError:
    return ParameterError(
        f"parameter {place} is the same tensor as {other}, which has been sharded already. Parameters that are shared "
        "must be in one group: leave out fully_shard on the inner module, so that the module that contains both takes "
        "them; or shard the modules that use them as one list; or name the module that owns them: "
        "fully_shard(..., shared_from=[owner])."
    )


def on_other_accelerators(devices: Mapping[str, torch.device], here: torch.device) -> dict[str, str]:
    """Return the devices from which parameters are not moved to ``here`` by default: all except CPU and meta."""
    return {name: str(d) for name, d in devices.items() if d != here and is_accelerator(d)}


def _named_modules(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module, nn.Module]]:
    """Return path, module, and the member of ``modules`` that contains it, for every module once."""
    seen: set[nn.Module] = set()
    named = []
    for index, top in enumerate(modules):
        prefix = str(index) if len(modules) > 1 else ""
        named += [(path, module, top) for path, module in top.named_modules(memo=seen, prefix=prefix)]
    return named


def _nested_parameters(modules: Sequence[nn.Module]) -> dict[int, tuple[FSDPState, ShardedParameter]]:
    """Return state and parameter by the id of each tensor that a group of ``modules`` owns or shares."""
    states = {state: None for module in modules if (state := find_state(module)) is not None}
    return {
        id(form): (state, parameter)
        for state in dict.fromkeys(each for nested in states for each in (nested, *nested.owner_states))
        for parameter in state.group.parameters
        for form in (parameter.sharded, parameter.unsharded)
    }


def resolve_dim(dim: int, shape: Sequence[int], name: str) -> int:
    """Return ``dim`` counted from the front, or raise a ``ParameterError`` that names the parameter."""
    if not shape:
        raise ParameterError(
            f"parameter {name!r} is a scalar (0-d) and has no dim to shard. Make it 1-d with one element "
            "(for example nn.Parameter(value.reshape(1))), or pass it in ignored_params."
        )
    if not -len(shape) <= dim < len(shape):
        raise ShardDimError(
            f"parameter {name!r} of shape {tuple(shape)} has no dim {dim}: "
            f"shard_placement_fn may return Shard(d) with {-len(shape)} <= d < {len(shape)}."
        )
    return dim % len(shape)


# -- weights that several modules share: the first group that takes one owns it


def holders(modules: Iterable[nn.Module]) -> list[FSDPState]:
    """Return the FSDP states that sharded parameters of which ``modules``, or modules below them, have the original."""
    taken = [find_replaced(parameter) for module in modules for parameter in module.parameters()]
    states = (state_of_parameter(each.parameter()) for each in taken if each is not None)
    return list(dict.fromkeys(state for state in states if state is not None))
