"""Clear what torch keeps of meshes whose process groups are destroyed."""

from __future__ import annotations


def forget_meshes() -> None:
    """Clear DTensor caches: they are keyed by *equal* meshes, and would return earlier meshes with destroyed groups.
    They also keep the threads of these groups alive: three for each, of which gloo's wakes 100 times per second."""
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
