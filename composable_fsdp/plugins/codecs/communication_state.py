"""The state of codecs with error feedback, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from composable_fsdp._core.gather import AnyBucket
from composable_fsdp._core.hooks import states_of
from composable_fsdp.codecs._encoder import Encoder
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plugins.codecs.encoded_reduce import encoders_of
from composable_fsdp.plugins.codecs.residuals import Residuals


class CommunicationState:
    """The residuals of ``ErrorFeedback`` in a sharded model: training state, as that of the optimizer is.

    It has the methods of ``torch.distributed.checkpoint``'s ``Stateful``, so it is saved and loaded with the rest:
    ``dcp.save({"model": ..., "optimizer": ..., "communication": CommunicationState(model)})``. The residuals of a rank
    belong to its own gradients, so they can be loaded only on the number of ranks they were saved on; on other numbers
    ``dcp.load`` reports a size mismatch. Omit it there: only the error of one step is lost.

    In the middle of a step, between its first backward and the optimizer's step, it is the state from before the step.
    A checkpoint has no gradients, so training resumes from there with the whole step.

    Args:
        model: the outermost sharded module, or one that contains it.

    Raises:
        ConfigurationError: no module in it is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return ``residual`` by the first parameter of each encoded bucket and the reduction stage.

        It is a uint8 ``DTensor`` of shape ``(all ranks' rows, bytes)``, sharded on dim 0 over all ranks of the
        parameters' mesh.
        """
        return {
            name: {"residual": _as_dtensor(encoder.residual(bucket.reducer.device), _mesh(bucket))}
            for name, bucket, encoder in self._encoders()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Raises:
            ConfigurationError: it was saved with other groups, codecs or numbers of ranks. Then nothing is loaded.
        """
        encoders = {name: (bucket, encoder) for name, bucket, encoder in self._encoders()}
        if encoders.keys() != state_dict.keys():
            raise ConfigurationError(
                "the communication state is of another model or other codecs: "
                f"missing {sorted(encoders.keys() - state_dict.keys())}, "
                f"unexpected {sorted(state_dict.keys() - encoders.keys())}."
            )
        found = {}
        for name, (bucket, encoder) in encoders.items():
            residual, own = state_dict[name]["residual"], encoder.residual(bucket.reducer.device)
            local = cast(Any, residual).to_local() if isinstance(residual, DTensor) else residual
            if local.shape != own.shape or residual.shape != _as_dtensor(own, _mesh(bucket)).shape:
                raise ConfigurationError(
                    f"the communication state of {name!r} has shape {tuple(residual.shape)}, but is "
                    f"{tuple(_as_dtensor(own, _mesh(bucket)).shape)} here. It can be loaded only on as many ranks, and "
                    "with the same codecs, as it was saved with; else leave it out."
                )
            found[name] = local
        for name, (_, encoder) in encoders.items():
            encoder.restore(found[name])

    def _encoders(self) -> Iterator[tuple[str, AnyBucket, Encoder]]:
        module_names = {module: name for name, module in self._model.named_modules()}
        for state_name, state in states_of(self._model):
            root = state.root
            for observer in () if root is None else root.observers.attached:
                if isinstance(observer, Residuals):
                    observer.commit(root)
            for bucket in state.group.buckets:
                name = _name(bucket, module_names) or state_name
                for stage, encoder in encoders_of(bucket).items():
                    if encoder.remembers and encoder.numel:
                        yield f"{name}.{stage}", bucket, encoder


def _name(bucket: AnyBucket, module_names: Mapping[nn.Module, str]) -> str | None:
    """Return the name of the bucket's first parameter, which no other bucket or pipeline stage has."""
    owned = ((module_names[m], name) for p in bucket.parameters for m, name in p.owners if m in module_names)
    return next((f"{module_name}.{name}" if module_name else name for module_name, name in owned), None)


def _mesh(bucket: AnyBucket) -> DeviceMesh:
    return cast(DTensor, bucket.parameters[0].sharded).device_mesh


def _as_dtensor(rows: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(rows, mesh, [Shard(0)] * mesh.ndim, run_check=False)
