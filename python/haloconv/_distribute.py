"""From full tensors to sharded ones and back."""

import torch
import torch.distributed as dist

from . import _ops
from ._check import as_int, on_rank
from ._dtensor import DTensor, Replicate, Shard, strides_of, wrap
from ._mesh import check_mesh


def as_dims(dim, mesh, ndim):
    """`dim` as one non-negative tensor dim for each mesh dim."""
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if len(dims) != mesh.ndim:
        raise ValueError(
            f"dim is {dim!r}, expected {'one dim' if mesh.ndim == 1 else f'a tuple of {mesh.ndim} dims'}, one for each "
            f"dim of the mesh {tuple(mesh.shape)}{on_rank()}"
        )
    result = []
    for value in dims:
        value = as_int("dim", value)
        if not -ndim <= value < ndim:
            raise ValueError(f"dim is {dim!r}, expected dims of a {ndim}-dimensional tensor{on_rank()}")
        result.append(value % ndim)
    if len(set(result)) != len(result):
        raise ValueError(f"dim is {dim!r}, expected different dims{on_rank()}")
    return tuple(result)


def placements_of(dim, mesh, ndim):
    """A Shard for each mesh dim."""
    return [Shard(value) for value in as_dims(dim, mesh, ndim)]


def _check_plain(name, tensor):
    kind = None
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        kind = type(tensor).__name__
    elif tensor.is_nested or tensor.layout != torch.strided:
        kind = f"{'nested' if tensor.is_nested else tensor.layout} tensor"
    elif tensor.is_quantized or tensor.is_meta:
        kind = f"{'quantized' if tensor.is_quantized else 'meta'} tensor"
    if kind is not None:
        raise TypeError(f"{name} is a {kind}, expected a plain, dense torch.Tensor with values{on_rank()}")


def distribute(tensor, mesh, dim=-1):
    """Shards a full tensor that every rank of the mesh holds alike. No communication; differentiable.

    Args:
        tensor: a plain tensor, any dtype, the same on all ranks.
        mesh: a DeviceMesh of n dims.
        dim: the tensor dim to shard; for n > 1 a tuple with one dim for each mesh dim.

    Returns:
        A DTensor with ``Shard(dim)``, by torch.chunk's rule; this rank keeps a copy of its own part only. The
        gradient that flows back is the full one, on every rank.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    check_mesh(mesh)
    _check_plain("tensor", tensor)
    placements = placements_of(dim, mesh, tensor.dim())
    tensor = tensor.to(mesh.device_type) if tensor.device.type != mesh.device_type else tensor
    if torch.compiler.is_compiling():
        whole = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=placements)
    return _Distribute.apply(tensor, mesh, placements)


class _Distribute(torch.autograd.Function):
    """Like a redistribution from Replicate, which need not keep the memory format, though."""

    @staticmethod
    def forward(ctx, tensor, mesh, placements):
        local = tensor
        for mesh_dim, placement in enumerate(placements):
            size, world = tensor.shape[placement.dim], mesh.size(mesh_dim)
            begin, end = _ops.shard_bounds(size, world, mesh.get_coordinate()[mesh_dim])
            local = local.narrow(placement.dim, begin, end - begin)
        channels_last = _ops.is_channels_last(tensor)
        strides = strides_of(local.shape, channels_last)
        copy = torch.empty_strided(local.shape, strides, dtype=tensor.dtype, device=tensor.device)
        return wrap(copy.copy_(local), mesh, placements, tensor.shape, channels_last)

    @staticmethod
    def backward(ctx, grad):
        return grad.full_tensor(), None, None


def _check_sizes(sizes, mesh):
    """One size, >= 0, for each dim of the mesh."""
    if len(sizes) != mesh.ndim:
        raise ValueError(
            f"size is {sizes}, expected one size for each dim of the mesh {tuple(mesh.shape)}{on_rank()}"
        )
    if any(as_int("size", size) < 0 for size in sizes):
        raise ValueError(f"size is {sizes}, expected nothing below 0{on_rank()}")
    return sizes


def shard_range(size, mesh):
    """Which part of a dim of `size` this rank holds: (begin, end).

    For a mesh of n > 1 dims `size` is a tuple with one size for each mesh dim, and so is the result.
    """
    check_mesh(mesh)
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    bounds = []
    for mesh_dim, value in enumerate(_check_sizes(sizes, mesh)):
        bounds.append(_ops.shard_bounds(value, mesh.size(mesh_dim), mesh.get_coordinate()[mesh_dim]))
    bounds = [(int(begin), int(end)) for begin, end in bounds]
    return bounds if isinstance(size, (tuple, list)) else bounds[0]


def distribute_local(local, mesh, dim=-1, size=None):
    """Makes a sharded tensor from each rank's own slab, for data too big to load whole. Differentiable.

    Args:
        local: this rank's slab, ``shard_range(size, mesh)`` of dim `dim`; all other sizes as on the other ranks.
        mesh: a DeviceMesh of n dims.
        dim: the sharded tensor dim; for n > 1 a tuple with one dim for each mesh dim.
        size: the global size of `dim` (a tuple for n > 1). None: the slabs are added up.

    Raises:
        TypeError, ValueError: an argument does not fit, or a slab is not the shard that torch.chunk's rule gives its
            rank. The ranks compare their shapes first (one small collective), so that raises on every rank.
    """
    check_mesh(mesh)
    _check_plain("local", local)
    local = local.to(mesh.device_type) if local.device.type != mesh.device_type else local
    dims = as_dims(dim, mesh, local.dim())
    sizes = None if size is None else tuple(size) if isinstance(size, (tuple, list)) else (size,)
    shape = _agreed_shape(local, mesh, dims, sizes)
    strides = strides_of(shape, _ops.is_channels_last(local))
    placements = [Shard(tensor_dim) for tensor_dim in dims]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def _agreed_shape(local, mesh, dims, sizes):
    """The global shape. Raises on every rank of the mesh when some rank's slab does not fit it."""
    slabs = [(mesh.get_coordinate(), tuple(local.shape), str(local.dtype), sizes)]
    for mesh_dim in range(mesh.ndim):
        parts = [None] * mesh.size(mesh_dim)
        dist.all_gather_object(parts, slabs, group=mesh.get_group(mesh_dim))
        slabs = [slab for part in parts for slab in part]
    first, (_, first_shape, dtype, sizes) = slabs[0], slabs[0]
    for coordinate, slab_shape, *rest in slabs:
        if rest != list(first[2:]) or len(slab_shape) != len(first_shape):
            raise ValueError(
                f"local has {len(slab_shape)} dims, dtype {rest[0]} and size={rest[1]} at {coordinate} of the mesh, "
                f"expected {len(first_shape)} dims, {dtype} and size={sizes} as at {first[0]}{on_rank()}"
            )
    if sizes is not None:  # only now: before, a rank that raised alone would have left the others waiting
        _check_sizes(sizes, mesh)
    shape = list(first_shape)
    for mesh_dim, tensor_dim in enumerate(dims):
        # Along this mesh dim, at the first position of the others: their slabs add up.
        line = [slab for slab in slabs if not any(slab[0][:mesh_dim]) and not any(slab[0][mesh_dim + 1 :])]
        whole = sum(slab[1][tensor_dim] for slab in line) if sizes is None else sizes[mesh_dim]
        shape[tensor_dim] = whole
    for coordinate, slab_shape, *_ in slabs:
        expected = list(shape)
        for mesh_dim, tensor_dim in enumerate(dims):
            begin, end = _ops.shard_bounds(shape[tensor_dim], mesh.size(mesh_dim), coordinate[mesh_dim])
            expected[tensor_dim] = end - begin
        if list(slab_shape) != expected:
            raise ValueError(
                f"local has shape {tuple(slab_shape)} at {coordinate} of the mesh, expected {tuple(expected)}: its "
                f"shard of {tuple(shape)} in dim(s) {dims}{on_rank()}"
            )
    return shape


def gather(dtensor):
    """The full plain tensor, on every rank. Differentiable: each rank then computes the same loss, and its gradient
    comes back sharded, equal to the unsplit one's part.

    Raises:
        TypeError: `dtensor` is not a DTensor.
    """
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"dtensor is a {type(dtensor).__name__}, expected a DTensor{on_rank()}")
    return dtensor.full_tensor()
