"""Error feedback: the error of a codec in one step is added to the next step's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from composable_fsdp.codecs.protocol import Codec, check_codec, resolve_codec
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.policies import checks_keywords


def _int8() -> Codec:
    from composable_fsdp.codecs.blockwise import Int8

    return Int8()


@checks_keywords
@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Adds the error of ``codec`` so far to each gradient, so that errors cancel instead of adding up.

    Each rank encodes ``gradient + decay * residual`` and keeps the error of that as the new residual (Seide et al.
    2014; Karimireddy et al. 2019, arXiv:1901.09847). A residual that is not finite, after an overflow, is dropped.
    So is that of a parameter without a gradient.

    On each rank, the residual of a reduce-scatter has as many values as the group's full gradients, encoded by
    ``keep``: by default a byte each and 4 bytes per block of 256. From the reduction in backward until the forward of
    the next step it takes that twice, so that a failed step can be undone (``reset_iter_state``). It starts from zero
    when ``requires_grad`` changes, when local tensors are replaced (``to``, ``to_empty``, loading with ``assign``) and
    in copies of the module. Checkpoints leave it out: only the error of one step is lost.

    Args:
        codec: the codec of the sum of gradient and residual.
        decay: factor of the residual from one step to the next, in (0, 1].
        keep: the codec of the residual between steps; ``Cast(torch.float32)`` is exact.
    """

    codec: Codec
    decay: float = 1.0
    keep: Codec = field(default_factory=_int8)

    def __post_init__(self) -> None:
        check_codec("ErrorFeedback(codec=...)", self.codec)
        check_codec("ErrorFeedback(keep=...)", self.keep)
        if not 0 < self.decay <= 1:
            raise ConfigurationError(f"ErrorFeedback(decay=...) must be above 0 and at most 1, not {self.decay!r}.")

    def for_parameter(self, shape: Sequence[int]) -> ErrorFeedback:
        """Return the error feedback for a parameter whose shard has this shape."""
        return replace(self, codec=resolve_codec(self.codec, shape), keep=resolve_codec(self.keep, shape))


def without_feedback(codec: Codec | ErrorFeedback | None) -> Codec | None:
    """Return the codec without its error feedback."""
    return codec.codec if isinstance(codec, ErrorFeedback) else codec
