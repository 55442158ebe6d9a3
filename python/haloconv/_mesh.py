"""Checks of a DeviceMesh."""

import functools

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from ._check import on_rank


def group_name(mesh, mesh_dim):
    """Name of the process group of a mesh dim."""
    try:
        return mesh.get_group(mesh_dim).group_name
    except RuntimeError as error:
        raise ValueError(f"mesh is {mesh}, expected one whose process groups are alive{on_rank()}") from error


def ranks_of(mesh):
    """All global ranks of a mesh, a set."""
    with unset_fake_temporarily():  # a mesh is real where tensors are fake
        return set(mesh.mesh.flatten().tolist())


@functools.lru_cache(maxsize=64)
def _first_unordered_dim(mesh):
    """The first mesh dim along which global ranks do not ascend, or None."""
    with unset_fake_temporarily():
        for mesh_dim in range(mesh.ndim):
            if mesh.size(mesh_dim) > 1 and not bool((mesh.mesh.diff(dim=mesh_dim) > 0).all()):
                return mesh_dim
    return None


def check_mesh(mesh):
    """Returns `mesh` if it is a DeviceMesh that haloconv can use.

    torch sorts the ranks of a process group, so on a mesh dim whose ranks do not ascend a rank's position in the mesh
    and in the group differ; torch's own collectives over such a mesh return the shards in the wrong order.

    Raises:
        TypeError: not a DeviceMesh.
        ValueError: this process is not part of it, or its ranks are out of order.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is {mesh!r}, expected a torch.distributed.DeviceMesh{on_rank()}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh is {mesh}, expected one that this process is part of{on_rank()}")
    unordered = _first_unordered_dim(mesh)
    if unordered is not None:
        raise ValueError(
            f"mesh is {mesh.mesh.tolist()}, expected its ranks in ascending order along dim {unordered}{on_rank()}"
        )
    return mesh
