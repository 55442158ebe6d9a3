"""Views that merge a sharded dim with dims after it, or split it: flattening rows, ``x.view(b, c, h, w // 2, 2)``, a
nearest upsampling or a space-to-depth written out by hand, windows of an image.

torch does it where every rank holds equally much. Elsewhere the parts that each rank has are not those that torch.chunk
gives it of the new dim, and torch gives up; here the columns in between move, as in a slice. Where the sharded dim has
others before it that it is merged with, as in ``x.flatten(2)`` for a loss, a rank's part would be many small pieces of
the result: the tensor is sharded by the first of them instead before, which moves it once (as `unfold` does).
"""

import math
import typing

import torch

from .._dtensor import Replicate, Shard, local_of
from .._layout import axes_of, exchanged, is_sharded, resharded, settled, wrap_as
from ._missing import last_resort
from ._registry import bound
from ._views import stands_for_view

aten = torch.ops.aten


class _Group(typing.NamedTuple):
    """Adjacent dims before and after that have the same elements: [begin, end) of both shapes."""

    begin: int
    end: int
    new_begin: int
    new_end: int


def _groups(old, new):
    """The smallest groups, for shapes of the same number of elements, not 0."""
    groups, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        begin, new_begin, size, new_size = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while size != new_size:
            if size < new_size:
                size, i = size * old[i], i + 1
            else:
                new_size, j = new_size * new[j], j + 1
        groups.append(_Group(begin, i, new_begin, j))
    if groups:  # what is left are ones
        groups[-1] = groups[-1]._replace(end=len(old), new_end=len(new))
    return groups


def _leading(shape, begin, end):
    """The first dim of a group that is not 1."""
    return next((dim for dim in range(begin, end) if shape[dim] != 1), begin)


def _resolved(shape, count):
    """`shape` without its -1; None where it does not fit `count` elements."""
    known = math.prod(size for size in shape if size != -1)
    if -1 in shape and known:
        shape = [count // known if size == -1 else size for size in shape]
    return shape if math.prod(shape) == count and count > 0 else None


def _leading_sharded(x, groups):
    """`x`, with no dim sharded that is not the leading one of its group; as it is where that cannot be. Channels and
    space in one dim of features are for a matrix, which needs the whole image: left as they are too."""
    axes = axes_of(x)
    for group in groups:
        sharded = [dim for dim in range(group.begin, group.end) if dim in axes]
        leading = _leading(x.shape, group.begin, group.end)
        are_features = group.begin == leading == 1
        if len(sharded) == 1 and sharded != [leading] and not are_features:
            x = resharded(x, axes[sharded[0]], leading)
    return x


def _placements(x, new, groups):
    """Where the result lies: by its leading dim, like the group that the sharded dim is in. None where another than the
    leading one is sharded, or two of one group are."""
    placements, taken = [], set()
    for mesh_dim, placement in enumerate(x.placements):
        if not placement.is_shard():
            placements.append(placement)
            continue
        dim = placement.dim % x.dim()
        group = next(group for group in groups if group.begin <= dim < group.end)
        if dim == _leading(x.shape, group.begin, group.end) and group not in taken:
            taken.add(group)
            placements.append(Shard(_leading(new, group.new_begin, group.new_end)))
        elif x.device_mesh.size(mesh_dim) == 1:
            placements.append(Replicate())
        else:
            return None
    return placements


@last_resort(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["self"]
    if not is_sharded(x):
        return None
    new = _resolved([int(size) for size in a["shape" if op is aten.reshape.default else "size"]], x.numel())
    if new is None:
        return None
    groups = _groups(x.shape, new)
    x = _leading_sharded(x, groups)
    axes = axes_of(x)
    placements = _placements(x, new, groups)
    if placements is None:
        return None
    x = settled(x)
    local, flat_sizes, cuts, local_shape = local_of(x), [], [], []
    for group in groups:
        axis = axes.get(_leading(x.shape, group.begin, group.end))
        count = math.prod(x.shape[group.begin : group.end])
        if axis is None:
            cuts.append(None)
            flat_sizes.append(count)
            local_shape += new[group.new_begin : group.new_end]
            continue
        leading = _leading(new, group.new_begin, group.new_end)
        column, new_column = count // x.shape[axis.dim], count // new[leading]  # elements at one index
        extents = []
        for rank in range(axis.world):
            begin, end = (bound * new_column for bound in axis.bounds(new[leading], rank))
            extents.append((begin // column, -(-end // column)) if end > begin else (0, 0))
        local = exchanged(local, axis, extents)
        begin, end = axis.bounds(new[leading])
        first, last = extents[axis.rank]
        cuts.append((len(flat_sizes), begin * new_column - first * column, (end - begin) * new_column))
        flat_sizes.append((last - first) * column)
        local_shape += new[group.new_begin : leading]
        local_shape += [end - begin, *new[leading + 1 : group.new_end]]
    local = local.reshape(flat_sizes)
    for dim, begin, length in filter(None, cuts):
        local = local.narrow(dim, begin if length else 0, length)
    local = local.reshape(local_shape)
    local = local.clone() if local.untyped_storage()._cdata == local_of(x).untyped_storage()._cdata else local
    result = wrap_as(local.contiguous(), x.device_mesh, placements, new)
    return result if op is aten._unsafe_view.default else stands_for_view(result, x)
