"""Muon on sharded parameters: each matrix is orthogonalised by one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from composable_fsdp._core.params import local_part
from composable_fsdp._extents import Box, like
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError
from composable_fsdp.optim._local_step import gradient_of, local_copies_of
from composable_fsdp.optim._owner_exchange import OwnerPlans, is_planned, title_of
from composable_fsdp.optim._owner_plan import newton_schulz_cost
from composable_fsdp.optim._owner_units import Slot, Unit, tiling_of
from composable_fsdp.optim._replaced_step import class_step
from composable_fsdp.optim.owner_step import placed
from composable_fsdp.policies import checks_keywords

_OF_BOTH = ("lr", "weight_decay")
_DIMS = {None: (2,), "muon": (2, 3), "adamw": ()}
"""The numbers of dims of matrices, by the algorithm of their group."""
_OF_MUON = (*_OF_BOTH, "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


@checks_keywords
class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for matrices, and AdamW for all other parameters, also for sharded ones.

    The update of a matrix is its momentum, orthogonalised by Newton-Schulz iterations in bfloat16, which need the whole
    matrix. Momentum stays sharded like the parameter. In a step, each matrix goes to one rank, its *owner*, which
    computes its update, and the updates come back: two all-to-alls of bfloat16 for each bucket of matrices. Owners are
    balanced by the cost of the iterations. Buckets are sent while others are computed.

    The results are bitwise those of ``torch.optim.Muon`` and ``torch.optim.AdamW`` on the unsharded parameters with the
    same gradients; of bfloat16 parameters, up to the rounding of ``add_``, which in torch depends on an element's place
    in memory. Parameters may be sharded in any way, or plain.

    ``param_groups`` has for each group given two: that of its matrices, which are its parameters of two dims, and that
    of its other parameters, which AdamW updates with ``lr`` and ``weight_decay`` of the group and torch's defaults. The
    entry ``"algorithm"`` is ``"muon"`` or ``"adamw"``. A group given with ``"algorithm": "adamw"`` is AdamW's as a
    whole, with any of AdamW's settings: embeddings and heads should be, although they have two dims. In one given with
    ``"algorithm": "muon"``, parameters of three dims are matrices, too: stacked ones, such as those of experts, one for
    each index of the first dim.
    State is DTensors placed as the parameters, so checkpoints, clipping, schedulers and gradient scalers work as with
    other optimizers.

    All ranks of a mesh must call ``step`` together, with gradients of the same parameters.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: the learning rate, a number or a tensor of one element.
        weight_decay: decoupled weight decay.
        momentum: the momentum factor.
        nesterov: use Nesterov momentum.
        ns_coefficients: the three coefficients of the iteration.
        eps: the smallest norm by which a matrix is divided.
        ns_steps: the number of iterations.
        adjust_lr_fn: ``"original"`` multiplies ``lr`` by ``sqrt(max(1, rows / columns))``, as does ``None``;
            ``"match_rms_adamw"`` by ``0.2 * sqrt(max(rows, columns))``, so that a learning rate of AdamW fits.
        bucket_bytes: the bytes of a bucket's messages on a rank. A step takes about twice as many, or 6 times the
            largest matrix in bfloat16 if that is more; and up to 5 times the matrix that is computed.

    Raises:
        ArgumentTypeError: parameters are in a set, which has no order.
        ConfigurationError: ``bucket_bytes`` or ``"algorithm"`` is out of range.
        ValueError: another setting is out of range, as ``torch.optim.Muon`` and ``torch.optim.AdamW`` raise it.

    Example::

        optimizer = Muon(
            [
                {"params": model.blocks.parameters()},
                {"params": model.embedding.parameters(), "algorithm": "adamw", "lr": 3e-4},
            ],
            lr=0.02,
        )
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        bucket_bytes: int = 256 << 20,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "algorithm": "muon",
        }
        if bucket_bytes <= 0:
            raise ConfigurationError(f"bucket_bytes must be positive, not {bucket_bytes}.")
        self._bucket_bytes = bucket_bytes
        self._plans = OwnerPlans(bucket_bytes)
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**cast(Any, super()).__getstate__(), "_bucket_bytes": self._bucket_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans = OwnerPlans(self._bucket_bytes)
        for group in self.param_groups:  # those of torch's Muon and AdamW do not say
            group.setdefault("algorithm", "muon" if "ns_steps" in group else "adamw")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the matrices of ``param_group``, and its other parameters, each as a group if there are any.

        Raises:
            ArgumentTypeError: the parameters are in a set, which has no order.
            ConfigurationError: ``"algorithm"`` is none that it knows.
            ValueError: another setting is out of range.
        """
        given = param_group["params"]
        if isinstance(given, (set, frozenset)):
            raise ArgumentTypeError("params must be a list: the order of a set differs from rank to rank.")
        items = [given] if isinstance(given, torch.Tensor) else list(given)
        algorithm = param_group.get("algorithm")
        if algorithm not in _DIMS:
            raise ConfigurationError(f"algorithm must be 'muon' or 'adamw', not {algorithm!r}.")
        matrices, others = list[Any](), list[Any]()
        for item in items:
            p = item[1] if isinstance(item, tuple) else item
            (matrices if getattr(p, "ndim", 0) in _DIMS[algorithm] else others).append(item)
        settings = {key: value for key, value in param_group.items() if key not in ("params", "algorithm")}
        if matrices:
            options = {**self.defaults, **settings}
            torch.optim.Muon([torch.empty(1, 1)], **{name: options[name] for name in _OF_MUON})  # raises ValueError
            super().add_param_group({**settings, "params": matrices, "algorithm": "muon"})
        if others:
            options = torch.optim.AdamW([torch.empty(0)]).defaults | {key: self.defaults[key] for key in _OF_BOTH}
            if algorithm != "adamw":
                settings = {key: value for key, value in settings.items() if key in _OF_BOTH or key not in _OF_MUON}
            super().add_param_group({**options, **settings, "params": others, "algorithm": "adamw"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. All ranks must call it together.

        Args:
            closure: computes the loss again and returns it.

        Returns:
            The result of ``closure``, or None.

        Raises:
            DivergenceError: ranks have gradients of different matrices. No parameter is changed, but momentum may be.
            PeerError: an owner raised. Both are raised on all ranks that share the matrices.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [group for group in self.param_groups if group["algorithm"] == "muon"]
        planned = [(p, group) for group in groups for p in group["params"] if is_planned(p)]
        if planned:
            self._step_matrices(planned)  # first, as it raises what ranks do not agree on
        adamw = torch.optim.AdamW([torch.empty(0)])
        adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        adamw.state = self.state
        with local_copies_of(adamw):
            class_step(adamw)(adamw)  # without hooks, which belong to this step
        return loss

    def _step_matrices(self, planned: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        parameters = [p for p, _ in planned]
        exchanges = self._plans.of(parameters, lambda: list(map(_matrices_in, parameters)))
        tasks = [None if p.grad is None else _MatrixTask(p, group, self.state[p]) for p, group in planned]
        for exchange, keys in exchanges:
            exchange.run([tasks[index] for index, _ in keys])
        # Autograd's version counter of the DTensors does not see writes to the local shards.
        increment_version([p for p in parameters if p.grad is not None])


def _matrices_in(parameter: torch.Tensor) -> list[Unit]:
    """Return the matrices of ``parameter``: itself, or those that are stacked in it."""
    title, tiling, dtype = title_of(parameter), tiling_of(parameter), torch.bfloat16  # in which the iterations are
    sizes, slots = parameter.shape[-2:], {title: Slot(tiling, dtype)}
    if parameter.ndim == 3:
        slots = {f"{title}[{i}]": Slot(tiling, dtype, (i, 0, 0), (1, *sizes)) for i in range(parameter.shape[0])}
    return [Unit((slot,), (slot,), newton_schulz_cost(*sizes), name) for name, slot in slots.items()]


class _MatrixTask:
    """The update of the matrices of one parameter in one step."""

    def __init__(self, parameter: torch.Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        gradient = gradient_of(parameter)
        if gradient.is_complex():
            raise ConfigurationError("Muon takes no complex parameters. Split them into real ones.")
        self.group = group
        self.shard, self.gradient = local_part(parameter).detach(), local_part(gradient)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = like(parameter, torch.zeros_like(self.gradient))
        buffer = placed(state["momentum_buffer"], parameter)  # a loaded one may be whole, or placed otherwise
        if local_part(buffer).dtype != self.gradient.dtype:  # torch loads state in the dtype of the parameter
            buffer = like(parameter, local_part(buffer).to(self.gradient.dtype))
        state["momentum_buffer"] = buffer
        self.buffer = local_part(buffer).lerp_(self.gradient, 1 - group["momentum"])
        lr = group["lr"]
        self.lr = lr.squeeze() if isinstance(lr, torch.Tensor) and lr.ndim else lr
        rows, columns = parameter.shape[-2:]
        factor = math.sqrt(max(1, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        self.rate: Any = self.lr * factor

    def load(self, slot: int, box: Box) -> torch.Tensor:
        buffer = box.of_part(self.buffer)
        return box.of_part(self.gradient).lerp(buffer, self.group["momentum"]) if self.group["nesterov"] else buffer

    def compute(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        (whole,) = inputs
        group, matrix = self.group, whole.view(whole.shape[-2:])
        update = orthogonalised(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
        return (update.reshape(whole.shape),)

    def store(self, slot: int, box: Box, piece: torch.Tensor) -> None:
        shard = box.of_part(self.shard)
        shard.mul_(1 - self.lr * self.group["weight_decay"])
        shard.add_(piece.to(shard.device), alpha=-self.rate)


def orthogonalised(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return about U V^T for the singular value decomposition U S V^T of ``matrix``, by Newton-Schulz iterations.

    Args:
        matrix: two dims, bfloat16. It is overwritten.
        coefficients: a, b and c of the polynomial a x + b x^3 + c x^5 of each iteration.
        steps: the number of iterations.
        eps: the smallest norm by which ``matrix`` is divided.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
