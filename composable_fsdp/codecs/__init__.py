"""Codecs: how the values of a bucket are encoded on the wire."""

from composable_fsdp.codecs.blockwise import Int4, Int8
from composable_fsdp.codecs.cast import Cast
from composable_fsdp.codecs.communication_policy import CommunicationPolicy
from composable_fsdp.codecs.error_feedback import ErrorFeedback
from composable_fsdp.codecs.float8 import Float8
from composable_fsdp.codecs.protocol import Codec

__all__ = ["Cast", "Codec", "CommunicationPolicy", "ErrorFeedback", "Float8", "Int4", "Int8"]
