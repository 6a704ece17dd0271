"""What a codec lost in one step is sent with the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from composable_fsdp.codecs.blockwise import Int8
from composable_fsdp.codecs.protocol import Codec, check_codec, resolve_codec
from composable_fsdp.errors import ConfigurationError

__all__ = ["ErrorFeedback", "without_feedback"]


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Adds to each gradient what ``codec`` lost of the earlier ones, so that errors cancel instead of piling up.

    Each rank encodes ``gradient + decay * residual`` and keeps what that lost as the new residual (Seide et al. 2014;
    Karimireddy et al. 2019, arXiv:1901.09847). A residual that is not finite, after an overflow, is dropped.

    The residual of a reduce-scatter is as large as the group's full gradients, on each rank, times what ``keep`` makes
    of a value: with the default a byte and 4 per block of 256. From the reduction in backward until the forward of the
    next step the residual takes that twice, so that a step that fails can be undone (``reset_iter_state``). It begins
    anew where ``requires_grad`` changes, where local tensors are replaced (``to``, ``to_empty``, loading with
    ``assign``) and in copies of the module. To save it with a checkpoint see
    :class:`composable_fsdp.CommunicationState`.

    Args:
        codec: how the sum of both travels.
        decay: what is kept of a residual from one step to the next, in (0, 1].
        reset_every: after so many reductions the residual is dropped; ``None``: never. Optimizers that meet very
            different gradients late in training profit (LoCo, Xie et al. 2024, arXiv:2407.04480).
        keep: how the residual rests between steps; ``Cast(torch.float32)`` is exact.
    """

    codec: Codec
    decay: float = 1.0
    reset_every: int | None = None
    keep: Codec = field(default_factory=Int8)

    def __post_init__(self) -> None:
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigurationError("ErrorFeedback takes a codec without error feedback of its own.")
        check_codec("ErrorFeedback(codec=...)", self.codec)
        check_codec("ErrorFeedback(keep=...)", self.keep)
        if not 0 < self.decay <= 1:
            raise ConfigurationError(f"ErrorFeedback(decay=...) must be above 0 and at most 1, not {self.decay!r}.")
        if self.reset_every is not None and (type(self.reset_every) is not int or self.reset_every < 1):
            raise ConfigurationError(
                f"ErrorFeedback(reset_every=...) is a whole number, at least 1, or None, not {self.reset_every!r}."
            )

    def for_parameter(self, shape: Sequence[int]) -> ErrorFeedback:
        """The same for a parameter whose piece on a rank has this shape."""
        return replace(self, codec=resolve_codec(self.codec, shape), keep=resolve_codec(self.keep, shape))


def without_feedback(codec: Codec | ErrorFeedback | None) -> Codec | None:
    """What travels."""
    return codec.codec if isinstance(codec, ErrorFeedback) else codec
