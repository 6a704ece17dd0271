
from composable_fsdp.checkpoint.forms import load_state_dict, state_dict, state_dict_form
from composable_fsdp.checkpoint.options import Full, Local, Sharded

__all__ = [
    "Full",
    "Local",
    "Sharded",
    "load_state_dict",
    "state_dict",
    "state_dict_form",
]
