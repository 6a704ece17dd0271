"""Names that this version lacks, of earlier versions and of torch, and what to do instead. For errors."""

from __future__ import annotations

from typing import NoReturn

_POLICY = "a policy is a function of a module and its name, or one of this package"
GONE = {
    "errors.LowPrecisionWarning": "is gone: remove its filter, nothing warns of parameters in 16 bits",
    "plan.sweep": "is gone: call plan for each setting, and take the fastest of those that fit",
    "plugins.PASSES": "is now plugins.PLAN_CHANGES",
    "plugins.weight_stream.FlushHeader": "is gone: a Flush has its values",
    "wrap.balanced": "is gone: use transformer_blocks() or by_size(min_parameters)",
    "wrap.Group": f"is gone: {_POLICY}",
    "wrap.Scope": f"is gone: {_POLICY}",
}
"""Names that modules of earlier versions had, and what replaces them."""


def missing(module: str, name: str) -> NoReturn:
    """Raise the error for a ``name`` that ``module`` lacks. Call it in the ``__getattr__`` of the module."""
    path = f"{module}.{name}".removeprefix("composable_fsdp.")
    if path in GONE:  # an AttributeError would lose its text in ``from ... import``
        raise ImportError(f"{path} {GONE[path]}.")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


_OPTIONS = ("max_unsharded_bytes", "prefetch_limit", "max_fused_bytes")
RENAMED = {f"set_{option}": f"set_schedule({option}=...)" for option in _OPTIONS}
RENAMED["set_version_check"] = 'set_in_place_check("counted") for True, and ("off") for False'
_BY_HAND = (
    "set_schedule(prefetch_limit=, max_fused_bytes=, max_unsharded_bytes=) sets the schedule by hand: nothing is "
    "measured, and nothing chosen by costs"
)
UNSUPPORTED = {
    **dict.fromkeys(("calibrate", "costs", "set_costs", "schedule_choice", "set_max_extra_bytes"), _BY_HAND),
    "set_stable_storage": "leave it out, and compile blocks with block.compile(): their graphs hold no collectives",
    "set_keep_unsharded_storage": "leave it out. set_reshard_after_forward(False) with "
    "set_reshard_after_backward(False) keeps the unsharded parameters where they are",
    "set_all_gather_layout": "leave it out, since large parameters are gathered into their place without copies. "
    "Tensor subclasses and comm_policy decide what is sent",
    "set_all_gather_output_fn": "leave it out: shards of dim 0 need no copy if they are large, and those of other dims "
    "are copied to their places once. fsdp_post_all_gather of a tensor subclass computes a parameter from what was "
    "gathered",
    "set_reduce_scatter_input_fn": "leave it out, or change what is sent by comm_policy",
}
"""Methods of earlier versions and of torch that sharded modules lack, and what to do instead."""
_ADMIT = "leave it out, and admit classes with torch.serialization.add_safe_globals before save and load."
_AVERAGED = "an AveragedModel of torch is saved and loaded as a model, in a folder of its own: save(folder, averaged)."
_MOVE = "move what a bucket or a flush has, such as bucket.packed.cpu()."
REMOVED_KEYWORDS = {
    ("CommunicationPolicy", "all_reduce"): "sums over the replicate axis are not encoded. Leave it out, or shard over "
    "all ranks.",
    ("ErrorFeedback", "reset_every"): "with decay= old errors fade.",
    ("Muon", "adamw"): 'put these parameters into a group with "algorithm": "adamw" and the settings of AdamW.',
    ("owner_step", "cost"): "leave it out: owners are balanced by the shapes of parameters.",
    ("offload_optimizer", "to"): "state rests in host memory: leave it out.",
    ("Muon", "matrices"): "make each matrix a parameter, or stack matrices in one of three dims, in a group with "
    '"algorithm": "muon".',
    ("offload_optimizer", "keep_bytes"): "all state rests in host memory. Leave it out, or make two optimizers, and "
    "offload one of them.",
    ("load", "restore_rng"): "leave it out, and seed torch after load to begin with other random numbers.",
    ("to_empty", "recurse"): "leave it out: parameters of modules below get memory too.",
    ("stream_full_params", "ahead"): "one bucket is gathered ahead. Leave it out.",
    **{(f"stream_{kind}_params", "device"): _MOVE for kind in ("full", "changed")},
    **{(function, "averages"): _AVERAGED for function in ("save", "load")},
    **{(function, "weights_only"): _ADMIT for function in ("save", "load")},
}
"""Keywords that earlier versions had, by their class or function and name, and what replaces them."""
OF_FSDP1 = {
    "module": "the model itself: fully_shard wraps nothing",
    "no_sync": "composable_fsdp.no_sync(model), or model.set_requires_gradient_sync(False)",
    "summon_full_params": "composable_fsdp.unsharded_params(model)",
    "clip_grad_norm_": "composable_fsdp.clip_grad_norm_(model.parameters(), max_norm)",
    **dict.fromkeys(
        ("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict", "optim_state_dict_to_load"),
        "composable_fsdp.checkpoint.optimizer_state_dict(model, optimizer), and load_optimizer_state_dict",
    ),
}
"""Attributes of torch's FullyShardedDataParallel, and what replaces them."""

FSDP1_ARGUMENTS = {
    "auto_wrap_policy": "Pass policy=, which takes ModuleWrapPolicy, CustomPolicy, and {Block}",
    "backward_prefetch": "Leave it out: backward prefetches, and set_schedule(prefetch_limit=n) says how far",
    "cpu_offload": "Pass offload_policy=CPUOffloadPolicy()",
    "device_id": "Pass device=",
    "device_mesh": "Pass mesh=",
    "forward_prefetch": "Leave it out: forward prefetches, and set_schedule(prefetch_limit=n) says how far",
    "ignored_states": "Pass ignored_params= or ignored_modules=",
    "limit_all_gathers": "Leave it out: set_schedule(prefetch_limit=n) limits them",
    "mixed_precision": "Pass mp_policy=MixedPrecisionPolicy(...)",
    "process_group": "Pass mesh=DeviceMesh.from_group(process_group, device_type)",
    "sharding_strategy": "Pass strategy=, which takes the same names",
    "use_orig_params": "Leave it out: optimizers always see one parameter for each of the module's",
}
"""The arguments of torch's ``FullyShardedDataParallel``, with the ways to say the same here."""
