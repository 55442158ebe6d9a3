"""Adaptive pooling.

Along a sharded dim of many outputs an average is a resampling (resizing.py), whose taps are the bins. Where there are
few outputs, bins span many shards: each rank pools what it has of every bin, and one all-reduce of the small result
puts the parts together. That result is replicated, as a classifier's `flatten` after it needs it.

A maximum is taken bin by bin along the sharded dims; ATen does the others. Indices are global, flat over the spatial
dims.
"""

import itertools
import math

import torch

from .._dtensor import Replicate, local_of
from .._layout import (
    all_reduced,
    axes_of,
    exchanged,
    exchanged_back,
    is_sharded,
    placed_like,
    settled,
    wrap_as,
)
from ._registry import backward_rule, rule, torchs_own
from .resizing import backward_dim, forward_dim, taps_of

aten = torch.ops.aten

_FEW = 8  # outputs a rank, below which they are not worth being sharded


class _Bins:
    """The numbers of an adaptive pooling of `x`, a settled DTensor of (N,) C, spatial dims."""

    def __init__(self, x, n, output_size):
        if x.dim() not in (n + 1, n + 2):
            raise ValueError(f"input has {x.dim()} dims, expected {n + 1} or {n + 2}")
        self.x, self.n, self.first = x, n, x.dim() - n
        self.sizes, self.out_sizes = tuple(x.shape[self.first :]), tuple(output_size)
        if len(self.out_sizes) != n or any(size < 1 for size in (*self.sizes, *self.out_sizes)):
            raise ValueError(
                f"input has spatial sizes {self.sizes} and output_size is {self.out_sizes}, expected {n} sizes > 0 each"
            )
        self.axes = {dim: axis for dim, axis in axes_of(x).items() if dim >= self.first}
        self.few = {dim: axis for dim, axis in self.axes.items() if self.out_size(dim) < _FEW * axis.world}
        self.many = {dim: axis for dim, axis in self.axes.items() if dim not in self.few}
        self.out_shape = (*x.shape[: self.first], *self.out_sizes)
        gone = {axis.mesh_dim for axis in self.few.values()}
        self.out_placements = [
            Replicate() if mesh_dim in gone else placement for mesh_dim, placement in enumerate(x.placements)
        ]

    def out_size(self, dim):
        return self.out_sizes[dim - self.first]

    def taps(self, dim, dtype):
        return taps_of("adaptive", self.x.shape[dim], self.out_size(dim), single=dtype != torch.float64)

    def bin(self, dim, output):
        """The interval of inputs of one output."""
        size, out = self.x.shape[dim], self.out_size(dim)
        return output * size // out, -(-(output + 1) * size // out)

    def whole_sizes(self, local, source):
        """Spatial sizes for ATen: those of `source` where the dim is whole, of `local` where it is sharded."""
        return [
            local.shape[self.first + i] if self.first + i in self.axes else source[i] for i in range(self.n)
        ]


# ---- average ----


@rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def _average(op, args, kwargs):
    x, output_size = args
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    bins = _Bins(x, len(output_size), output_size)
    local = local_of(x)
    sizes = bins.whole_sizes(local, bins.out_sizes)
    local = op(local, sizes) if local.numel() > 0 else local.new_empty((*local.shape[: bins.first], *sizes))
    for dim, axis in bins.many.items():
        local = forward_dim(local, dim, bins.taps(dim, x.dtype), axis)
    for dim, axis in bins.few.items():
        part = bins.taps(dim, x.dtype).matrix(*axis.bounds(), local)
        sums = torch.matmul(local.movedim(dim, -1).to(part.dtype), part)
        local = all_reduced(sums, [axis]).movedim(-1, dim).to(x.dtype)
    return wrap_as(local, x.device_mesh, bins.out_placements, bins.out_shape)


@backward_rule(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def _average_backward(op, args, kwargs):
    grad, x = args
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    n = 2 if op is aten._adaptive_avg_pool2d_backward.default else 3
    bins = _Bins(x, n, grad.shape[-n:])
    local = local_of(placed_like(grad, x, bins.out_placements))
    for dim, axis in bins.few.items():
        part = bins.taps(dim, x.dtype).matrix(*axis.bounds(), local)
        local = torch.matmul(local.movedim(dim, -1).to(part.dtype), part.t()).movedim(-1, dim).to(x.dtype)
    for dim, axis in reversed(bins.many.items()):
        local = backward_dim(local, dim, bins.taps(dim, x.dtype), axis)
    source = local.new_empty((*local.shape[: bins.first], *bins.whole_sizes(local, bins.sizes)))
    local = op(local.contiguous(), source) if local.numel() > 0 else torch.empty_like(source)
    return wrap_as(local, x.device_mesh, x.placements, x.shape)


# ---- maximum ----


def _extents(bins, dim, axis):
    """What each rank reads in a sharded dim: the bins of its outputs; its own shard, where outputs are few."""
    extents = []
    for rank in range(axis.world):
        if dim in bins.few:
            extents.append(axis.bounds(rank=rank))
            continue
        begin, end = axis.bounds(bins.out_size(dim), rank)
        extents.append((bins.bin(dim, begin)[0], bins.bin(dim, end - 1)[1]) if end > begin else (0, 0))
    return extents


def _own_outputs(bins, dim):
    if dim in bins.many:
        return range(*map(int, bins.axes[dim].bounds(bins.out_size(dim))))
    return range(bins.out_size(dim))


def _bin_by_bin(bins, extents):
    """For each combination of outputs in the sharded dims: (outputs, the bin's part that is read here)."""
    dims = list(bins.axes)
    for outputs in itertools.product(*(_own_outputs(bins, dim) for dim in dims)):
        parts = []
        for dim, output in zip(dims, outputs):
            begin, end = bins.bin(dim, output)
            low, high = extents[dim][bins.axes[dim].rank]
            begin, end = min(max(begin, low), high), min(end, high)
            parts.append((begin, max(begin, end)))
        yield dict(zip(dims, outputs)), dict(zip(dims, parts))


def _flat(bins, at):
    """Flat global indices from those of each spatial dim."""
    flat = 0
    for i, index in enumerate(at):
        flat = flat * bins.sizes[i] + index
    return flat


def _unflat(sizes, flat):
    at = []
    for size in reversed(sizes):
        at.append(flat % size)
        flat = torch.div(flat, size, rounding_mode="floor")
    return at[::-1]


@rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def _maximum(op, args, kwargs):
    x, output_size = args
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    bins = _Bins(x, len(output_size), output_size)
    read, extents = local_of(x), {}
    for dim, axis in bins.axes.items():
        extents[dim] = _extents(bins, dim, axis)
        read = exchanged(read, axis, extents[dim])
    shape = list(read.shape[: bins.first])
    for i in range(bins.n):
        shape.append(len(_own_outputs(bins, bins.first + i)))
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    values = read.new_full(shape, lowest)
    nowhere = math.prod(bins.sizes)  # beyond every index
    indices = read.new_full(shape, nowhere, dtype=torch.int64)
    for outputs, parts in _bin_by_bin(bins, extents):
        slab, target, target_indices = read, values, indices
        begins = [0] * bins.n
        sizes = list(bins.out_sizes)
        for dim, (begin, end) in parts.items():
            slab = slab.narrow(dim, begin - extents[dim][bins.axes[dim].rank][0], end - begin)
            first = _own_outputs(bins, dim)[0]
            target = target.narrow(dim, outputs[dim] - first, 1)
            target_indices = target_indices.narrow(dim, outputs[dim] - first, 1)
            begins[dim - bins.first], sizes[dim - bins.first] = begin, 1
        if slab.numel() == 0:
            continue
        best, where = op(slab, sizes)
        at = _unflat(slab.shape[bins.first :], where)
        target.copy_(best)
        target_indices.copy_(_flat(bins, [index + begin for index, begin in zip(at, begins)]))
    few = list(bins.few.values())
    if few:
        best = all_reduced(values, few, "max")
        ours = (values == best) | (values.isnan() & best.isnan())
        indices = all_reduced(torch.where(ours, indices, nowhere), few, "min")
        values = best
    wrapped = [wrap_as(t, x.device_mesh, bins.out_placements, bins.out_shape) for t in (values, indices)]
    return tuple(wrapped)


@backward_rule(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
def _maximum_backward(op, args, kwargs):
    grad, x, indices = args
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    n = 2 if op is aten.adaptive_max_pool2d_backward.default else 3
    bins = _Bins(x, n, grad.shape[-n:])
    grad, indices = (local_of(placed_like(t, x, bins.out_placements)) for t in (grad, indices))
    extents = {dim: _extents(bins, dim, axis) for dim, axis in bins.axes.items()}
    box, inside = [], torch.ones_like(indices, dtype=torch.bool)
    at = _unflat(bins.sizes, indices)
    for i in range(n):
        dim = bins.first + i
        begin, end = (0, bins.sizes[i])
        if dim in extents:
            begin, end = map(int, extents[dim][bins.axes[dim].rank])
        inside &= (at[i] >= begin) & (at[i] < end)  # of few outputs, some lie in other ranks' shards
        at[i] = at[i] - begin
        box.append(end - begin)
    flat = 0
    for i in range(n):
        flat = flat * box[i] + at[i]
    lead = grad.shape[: bins.first]
    spread = grad.new_zeros((*lead, math.prod(box)))
    if spread.numel() > 0:
        flat, values = torch.where(inside, flat, 0), torch.where(inside, grad, 0)
        spread.scatter_add_(-1, flat.flatten(bins.first), values.flatten(bins.first))
    local = spread.view(*lead, *box)
    for dim, axis in reversed(bins.axes.items()):
        local = exchanged_back(local, axis, extents[dim])
    return wrap_as(local, x.device_mesh, x.placements, x.shape)
