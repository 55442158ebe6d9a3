"""Padding: constant (negative widths crop), reflect, replicate, circular.

Each output position is a copy of one input position, or of the constant. A rank fetches the interval of input positions
that its outputs copy, then puts its outputs together from pieces of that interval: as it is, mirrored, or repeated.
Backward: each piece's gradient is added to where it was copied from, and the interval's parts go home and are added.

A dim that is not sharded is the same with a single rank, which fetches nothing.
"""

import functools

import torch

from .. import _ops
from .._dtensor import DTensor, local_of
from .._layout import axes_of, exchanged, exchanged_back, is_sharded, placed_like, settled, wrap_as
from ._registry import backward_rule, bound, rule, torchs_own

aten = torch.ops.aten


def _by_dim(pad, ndim):
    """F.pad's list, last dim first, as {dim: (left, right)} of the dims that are padded."""
    if len(pad) % 2 or len(pad) > 2 * ndim:
        raise ValueError(f"pad is {tuple(pad)}, expected two integers for each of up to {ndim} dims")
    widths = {ndim - 1 - at: (pad[2 * at], pad[2 * at + 1]) for at in range(len(pad) // 2)}
    return {dim: width for dim, width in widths.items() if width != (0, 0)}


def _padded_shape(shape, widths, least):
    shape = list(shape)
    for dim, (left, right) in widths.items():
        if shape[dim] + left + right < least:
            raise ValueError(
                f"pad is ({left}, {right}) on dim {dim} of size {shape[dim]}, expected an output of at least {least}"
            )
        shape[dim] += left + right
    return shape


# ---- constant ----


def _fill_outside(extended, dim, extent, size, value):
    """`value` where the interval leaves the tensor."""
    begin, end = extent
    left, right = min(max(-begin, 0), end - begin), min(max(end - size, 0), end - begin)
    extended.narrow(dim, 0, left).fill_(value)
    extended.narrow(dim, end - begin - right, right).fill_(value)


# Its own backward, with negated widths.
@backward_rule(aten.constant_pad_nd.default)
def _constant_pad(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, pad, value = a["self"], a["pad"], a["value"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    widths = _by_dim(pad, x.dim())
    shape = _padded_shape(x.shape, widths, 0)
    axes, local = axes_of(x), local_of(x)
    own = [0 if x.dim() - 1 - at // 2 in axes else width for at, width in enumerate(pad)]
    fetched = [dim for dim in widths if dim in axes]
    if any(own) or not fetched:
        local = op(local, own, value)
    exact = x.dtype.is_floating_point and value == float(value)  # the exchange fills with a double
    for dim in fetched:
        axis, left = axes[dim], widths[dim][0]
        extents = [(begin - left, end - left) for begin, end in _all_bounds(axis, shape[dim])]
        local = exchanged(local, axis, extents, float(value) if exact else 0.0)
        if not exact:
            _fill_outside(local, dim, extents[axis.rank], axis.size, value)
    return wrap_as(local, x.device_mesh, x.placements, shape)


def _all_bounds(axis, size):
    """Every rank's interval of a dim of this size."""
    return [axis.bounds(size, rank) for rank in range(axis.world)]


# ---- reflect, replicate ----


def _source(mode, position, size):
    """Which input position an output position, counted from the input's first, copies."""
    if mode == "replicate":
        return min(max(position, 0), size - 1)
    return abs(position) if position < size else 2 * (size - 1) - position


@functools.lru_cache(maxsize=1024)
def _plan(mode, size, left, right, rank, world):
    """(extent of every rank, pieces of this one's outputs).

    A piece (begin, length, step) of positions in the interval: step 1 as it is, -1 mirrored, 0 one position repeated.
    """
    extents, out_size = [], size + left + right
    for other in range(world):
        begin, end = _ops.shard_bounds(out_size, world, other)
        sources = [_source(mode, position - left, size) for position in range(begin, end)]
        extents.append((min(sources), max(sources) + 1) if sources else (0, 0))
        if other == rank:
            own = sources
    pieces = []
    for source in own:
        at = source - extents[rank][0]
        if pieces:
            first, length, step = pieces[-1]
            if length == 1 or at == first + step * length:
                if length == 1:
                    step = at - first
                if step in (-1, 0, 1):
                    pieces[-1] = (first, length + 1, step)
                    continue
        pieces.append((at, 1, 1))
    return tuple(extents), tuple(pieces)


def _span(piece):
    """(begin, length) of the interval's part that a piece copies."""
    first, length, step = piece
    return (first, 1) if step == 0 else (first if step > 0 else first - length + 1, length)


def _put_together(extended, dim, pieces):
    parts = []
    for piece in pieces:
        part = extended.narrow(dim, *_span(piece))
        if piece[2] < 0:
            part = part.flip(dim)
        elif piece[2] == 0:
            part = part.expand([piece[1] if at == dim else -1 for at in range(part.dim())])
        parts.append(part)
    if not parts:
        return extended.narrow(dim, 0, 0)
    return torch.cat(parts, dim)


def _take_apart(grad, dim, length, pieces):
    """The adjoint of `_put_together`, for an interval of this length."""
    shape = list(grad.shape)
    shape[dim] = length
    if not pieces:
        return grad.new_zeros(shape)
    lengths = [piece[1] for piece in pieces]
    parts = grad.split(lengths, dim)
    extended = torch.zeros_like(grad.narrow(dim, 0, 1).expand(shape), memory_format=format_of(grad))
    for piece, part in zip(pieces, parts):
        if piece[2] < 0:
            part = part.flip(dim)
        elif piece[2] == 0:
            part = part.sum(dim, keepdim=True)
        extended.narrow(dim, *_span(piece)).add_(part)
    return extended


def format_of(tensor):
    if not _ops.is_channels_last(tensor):
        return torch.contiguous_format
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def _checked(op, x, padding):
    """(mode, padding by dim, padded shape) of reflection_pad2d and its kin."""
    name = op._schema.name
    mode = "reflect" if "reflection" in name else "replicate"
    n = next(n for n in (1, 2, 3) if f"pad{n}d" in name)
    if x.dim() not in (n + 1, n + 2):
        raise ValueError(f"input has {x.dim()} dims, expected {n + 1} or {n + 2} for {name}")
    if len(padding) != 2 * n:
        raise ValueError(f"padding is {tuple(padding)}, expected {2 * n} integers")
    widths = _by_dim(padding, x.dim())
    for dim, width in widths.items():
        size = x.shape[dim]
        if mode == "reflect" and max(width) >= size:
            raise ValueError(
                f"padding is {width} on dim {dim}, expected less than its size {size} to reflect"
            )
        if size == 0:
            raise ValueError(f"input has size 0 in dim {dim}, expected at least 1 to {mode}")
    return mode, widths, _padded_shape(x.shape, widths, 1)


def _in_order(x, mode, widths):
    """(dim, axis or None, extents, pieces) of each padded dim: those that don't communicate first."""
    axes = axes_of(x)
    for dim in sorted(widths, key=lambda dim: (dim in axes, dim)):
        axis = axes.get(dim)
        place = (axis.rank, axis.world) if axis else (0, 1)
        yield dim, axis, *_plan(mode, x.shape[dim], *widths[dim], *place)


_PADS = [getattr(aten, f"{kind}_pad{n}d") for kind in ("reflection", "replication") for n in (1, 2, 3)]
_BACKWARDS = [
    getattr(aten, f"{kind}_pad{n}d_backward") for kind in ("reflection", "replication") for n in (1, 2, 3)
]


@rule(*(packet.default for packet in _PADS))
def _pad(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = settled(a["self"])
    mode, widths, shape = _checked(op, x, a["padding"])
    local = local_of(x)
    for dim, axis, extents, pieces in _in_order(x, mode, widths):
        if axis:
            local = exchanged(local, axis, extents)
        else:
            local = local.narrow(dim, extents[0][0], extents[0][1] - extents[0][0])
        local = _put_together(local, dim, pieces)
    return wrap_as(local if widths else local.clone(), x.device_mesh, x.placements, shape)


@backward_rule(*(packet.default for packet in _BACKWARDS))
def _pad_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, grad = settled(a["self"]), a["grad_output"]
    mode, widths, _ = _checked(op, x, a["padding"])
    local = local_of(placed_like(grad, x))
    for dim, axis, extents, pieces in reversed(list(_in_order(x, mode, widths))):
        begin, end = extents[axis.rank if axis else 0]
        local = _take_apart(local, dim, end - begin, pieces)
        if axis:
            local = exchanged_back(local, axis, extents)
        elif end - begin != x.shape[dim]:  # a part that was cropped
            pad = [0, 0] * (x.dim() - 1 - dim) + [begin, x.shape[dim] - end]
            local = aten.constant_pad_nd.default(local, pad, 0)
    return wrap_as(local if widths else local.clone(), x.device_mesh, x.placements, x.shape)


# ---- circular ----


def _pad_circular(x, pad):
    """F.pad(mode="circular") by ops that have derivatives and rules of their own. torch's own writes into views."""
    for dim, (left, right) in _by_dim(pad, x.dim()).items():
        size = x.shape[dim] + min(left, 0) + min(right, 0)
        if max(left, right) > size or size < 1:
            raise ValueError(
                f"pad is ({left}, {right}) on dim {dim} of size {x.shape[dim]}, expected at most once around"
            )
        if (left, right) != (max(left, 0), max(right, 0)):
            x = x.narrow(dim, max(-left, 0), size)
        parts = [x]
        if left > 0:
            parts.insert(0, x.narrow(dim, size - left, left))
        if right > 0:
            parts.append(x.narrow(dim, 0, right))
        x = torch.cat(parts, dim)
    return x


@rule(aten._pad_circular.default)  # comes here in inference mode alone
def _circular_rule(op, args, kwargs):
    return _pad_circular(*args, **kwargs)


def _circular_kernel(x, pad):
    """For every tensor, above autograd."""
    if isinstance(x, DTensor):
        return _pad_circular(x, pad)
    return aten._pad_circular.default.decompose(x, pad)


# F.pad calls it in C++, where torch decomposes it before DTensor comes into play.
_library = torch.library.Library("aten", "IMPL")
for _key in ("AutogradCPU", "AutogradCUDA"):
    _library.impl("_pad_circular", _circular_kernel, _key)
