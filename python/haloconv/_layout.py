"""How a DTensor lies on its mesh, and the moves along one of its sharded dims that the rules are made of. All of it
below autograd, on local tensors.

An *axis* is a tensor dim that is split over two or more ranks. Everything that a rule has to know about sharding is in
the axes of its inputs; dims that are whole, or split over a mesh dim of size 1, are none.
"""

import math
import time
import typing

import torch
import torch.distributed as dist

from . import _ops, _transport
from ._check import on_rank
from ._dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    at_least_one,
    is_exactly_shard,
    local_of,
    wrap_strided,
)
from ._mesh import check_mesh, group_name


class Axis(typing.NamedTuple):
    """A tensor dim that is split over the ranks of a mesh dim."""

    mesh_dim: int
    dim: int
    size: int  # global
    rank: int
    world: int
    group: str

    def bounds(self, size=None, rank=None):
        """This rank's interval of the dim, or of one of another global size that is sharded alike."""
        return _ops.shard_bounds(
            self.size if size is None else size, self.world, self.rank if rank is None else rank
        )


def is_sharded(x):
    """Whether a value is a DTensor with a Shard placement, or a kin of it."""
    return isinstance(x, DTensor) and not all(isinstance(p, (Replicate, Partial)) for p in x.placements)


def axes_of(x, what="input"):
    """The axes of a DTensor, by tensor dim. Raises ValueError where they cannot be told: see `settled`."""
    mesh, found = x.device_mesh, {}
    coordinate = None
    for mesh_dim, placement in enumerate(x.placements):
        world = mesh.size(mesh_dim)
        if isinstance(placement, (Replicate, Partial)) or world == 1:
            continue
        if not is_exactly_shard(placement):
            raise ValueError(
                f"{what} has placement {placement} on mesh dim {mesh_dim}, expected Shard or Replicate: redistribute "
                f"it first{on_rank()}"
            )
        dim = placement.dim % x.dim()
        if dim in found:
            raise ValueError(
                f"{what} is sharded in dim {dim} by mesh dims {found[dim].mesh_dim} and {mesh_dim}, expected one mesh "
                f"dim for each dim: redistribute it first{on_rank()}"
            )
        if coordinate is None:
            check_mesh(mesh) if torch._guards.detect_fake_mode(local_of(x)) is None else None
            coordinate = mesh.get_coordinate()
        found[dim] = Axis(
            mesh_dim, dim, x.shape[dim], coordinate[mesh_dim], world, group_name(mesh, mesh_dim)
        )
    return found


def settled(x):
    """`x` without Partial placements: an all-reduce, where there are any."""
    if any(isinstance(placement, Partial) for placement in x.placements):
        return x.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in x.placements])
    return x


def sharded_like(x, other):
    """`x`, sharded also where `other` is and it is not: a replicated input whose result was used sharded gets a sharded
    gradient. Free: each rank keeps its part. Channels, dim 1, are left alone."""
    if not (isinstance(x, DTensor) and isinstance(other, DTensor)) or x.dim() != other.dim():
        return x
    placements = list(x.placements)
    for mesh_dim, (own, wanted) in enumerate(zip(x.placements, other.placements)):
        free = isinstance(own, Replicate) and is_exactly_shard(wanted) and wanted not in placements
        if free and wanted.dim % x.dim() != 1:
            placements[mesh_dim] = wanted
    return moved_to(x, placements)


def placed_like(tensor, x, placements=None):
    """A tensor argument beside `x`: a DTensor with the placements of `x`, or those given. A plain one is replicated."""
    placements = tuple(x.placements if placements is None else placements)
    if not isinstance(tensor, DTensor):
        replicated = [Replicate()] * x.device_mesh.ndim
        tensor = wrap_strided(tensor.detach(), x.device_mesh, replicated, tensor.shape, tensor.stride())
    return moved_to(tensor, placements)


def wrap_as(local, mesh, placements, shape):
    """A DTensor of the global `shape` around `local`; its strides are dense, in the order that `local` has."""
    order = sorted(range(local.dim()), key=lambda dim: (-local.stride(dim), dim))
    if _ops.is_channels_last(local):
        order = [0, *range(2, local.dim()), 1]
    elif local.is_contiguous() or local.numel() == 0:
        order = range(local.dim())
    strides, stride = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = stride
        stride = stride * at_least_one(shape[dim])
    return wrap_strided(local, mesh, placements, shape, strides)


# ---- moves along an axis ----


def windowed(local, axis, window, fill=0.0, periodic=False):
    """The interval that the windows of this rank's outputs read, `fill` where it leaves the tensor.

    window: (kernel, stride, pad_lo, pad_hi, dilation). Outputs are sharded over the same group.
    """
    return _ops.ops.halo_exchange(
        local, axis.dim, axis.size, [*window, 0], False, periodic, fill, axis.rank, axis.world, axis.group
    )


def windowed_back(grad, axis, window, periodic=False):
    """The adjoint of `windowed`: the gradient of this rank's shard from that of the interval, whose memory is used up:
    two buffers of an activation's size would otherwise be alive at once."""
    tracing = torch._guards.detect_fake_mode(grad) is not None
    op = _ops.ops.halo_reduce if tracing else _ops.ops.halo_reduce_
    return op(grad, axis.dim, axis.size, [*window, 0], False, periodic, axis.rank, axis.world, axis.group)


def exchanged(local, axis, extents, fill=0.0, periodic=False):
    """The interval extents[axis.rank], in global coordinates. extents: a (begin, end) for each rank."""
    flat = [int(bound) for extent in extents for bound in extent]
    return _ops.ops.exchange(
        local, axis.dim, axis.size, flat, periodic, fill, axis.rank, axis.world, axis.group
    )


def exchanged_back(grad, axis, extents, periodic=False):
    """The adjoint of `exchanged`."""
    flat = [int(bound) for extent in extents for bound in extent]
    return _ops.ops.exchange_reduce(
        grad, axis.dim, axis.size, flat, periodic, axis.rank, axis.world, axis.group
    )


def resharded(x, axis, dim):
    """The DTensor `x`, sharded in `dim` instead of its `axis`: all-to-all, which moves each element once. torch does it
    by an all-gather on the CPU."""
    x = settled(x)
    placements = list(x.placements)
    placements[axis.mesh_dim] = Shard(dim)
    if torch._guards.detect_fake_mode(local_of(x)) is not None:
        return x.redistribute(placements=placements)
    local, mesh = local_of(x).contiguous(), x.device_mesh
    new = axis._replace(dim=dim, size=x.shape[dim])
    blocks, shapes = [], []
    for peer in range(axis.world):
        begin, end = new.bounds(rank=peer)
        blocks.append(local.narrow(dim, begin, end - begin))
    for peer in range(axis.world):
        begin, end = axis.bounds(rank=peer)
        shape = list(local.shape)
        shape[dim], shape[axis.dim] = blocks[axis.rank].shape[dim], end - begin
        shapes.append(shape)
    counts = [math.prod(shape) for shape in shapes]
    received = local.new_empty(sum(counts))
    started = time.perf_counter()
    dist.all_to_all_single(
        received.view(torch.uint8),
        torch.cat([block.flatten() for block in blocks]).view(torch.uint8),
        [count * local.element_size() for count in counts],
        [block.nbytes for block in blocks],
        group=mesh.get_group(axis.mesh_dim),
    )
    sent = sum(block.nbytes for peer, block in enumerate(blocks) if peer != axis.rank)
    seconds = time.perf_counter() - started
    _transport.statistics.add("all_to_all", messages=axis.world - 1, bytes=sent, exchanges=1, seconds=seconds)
    parts = [part.view(shape) for part, shape in zip(received.split(counts), shapes)]
    return wrap_as(torch.cat(parts, axis.dim), mesh, placements, x.shape)


def moved_to(x, placements):
    """`x` with these placements."""
    if x.placements == tuple(placements):
        return x
    mesh, ndim = x.device_mesh, x.dim()
    changes = [
        (mesh_dim, was, becomes)
        for mesh_dim, (was, becomes) in enumerate(zip(x.placements, placements))
        if was != becomes
    ]
    mesh_dim, *both = changes[0]
    shards = [placement for placement in x.placements if not isinstance(placement, Replicate)]
    if len(changes) == 1 and all(map(is_exactly_shard, (*both, *shards))) and mesh.size(mesh_dim) > 1:
        was, becomes = (placement.dim % ndim for placement in both)
        taken = [placement.dim % ndim for placement in shards]
        if taken.count(was) == 1 and becomes not in taken:
            return resharded(x, axes_of(x)[was], becomes)
    return x.redistribute(placements=placements)


def all_reduced(local, axes, reduction="sum"):
    """The "sum", "max" or "min" over the ranks of every axis. For small tensors; the same bits on every rank."""
    for axis in axes:
        local = _ops.ops.all_reduce(local, reduction, axis.rank, axis.world, axis.group)
    return local


# ---- failures ----


def report_failure(error, args):
    """Tells the ranks that may wait for this one in an op on `args`. Where the C core raised, it has done so itself."""
    if "haloconv::" in str(error) or getattr(error, "_haloconv_reported", False):
        return
    for x in torch.utils._pytree.tree_leaves(args):
        if is_sharded(x) and torch._guards.detect_fake_mode(local_of(x)) is None:
            for mesh_dim, placement in enumerate(x.placements):
                if placement.is_shard() and x.device_mesh.size(mesh_dim) > 1:
                    _transport.report(group_name(x.device_mesh, mesh_dim), str(error))
            break
    error._haloconv_reported = True
