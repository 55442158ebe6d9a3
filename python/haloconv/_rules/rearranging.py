"""What moves columns about: slices, cat, flip, roll, pixel shuffle, sliding windows.

A result is sharded like its input, by torch.chunk's rule for the new size: each rank fetches the columns that its part
of the result is made of. Along dims that are not sharded, everything is local.

* Slices, splits and the like are views in torch, copies here: see _views.py.
* One index of a sharded dim (`select`): every rank gets it.
"""

import torch

from .._check import on_rank
from .._dtensor import DTensor, Partial, Replicate, Shard, local_of, wrap_strided
from .._layout import axes_of, exchanged, exchanged_back, is_sharded, placed_like, settled, wrap_as
from ._missing import _without_sharded_form
from ._registry import backward_rule, bound, rule, torchs_own
from ._views import stands_for_view
from .padding import format_of

aten = torch.ops.aten


def _dim_of(dim, ndim, name="dim"):
    if not -ndim <= dim < ndim:
        raise IndexError(f"{name} is {dim}, expected -{ndim} to {ndim - 1}{on_rank()}")
    return dim % ndim


def _shape_with(x, dim, size):
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _all_bounds(axis, size):
    """Every rank's interval of a dim of this size that is sharded like the axis."""
    return [axis.bounds(size, rank) for rank in range(axis.world)]


def _fetched(x, local, axis, extents):
    """This rank's interval of an input: by an exchange, or from the whole of it where it has that."""
    if isinstance(x, DTensor) and x.placements[axis.mesh_dim].is_shard():
        return exchanged(local, axis._replace(size=x.shape[axis.dim]), extents)
    begin, end = extents[axis.rank]
    return local.narrow(axis.dim, begin, end - begin)


def _placed(x, reference, placements, axis):
    """Like `placements`, except that what is whole along the axis stays so."""
    placements = list(placements)
    if axis and not (isinstance(x, DTensor) and x.placements[axis.mesh_dim].is_shard()):
        placements[axis.mesh_dim] = Replicate()
    return placed_like(x, reference, placements)


# The backward of a slice is told the input's shape, not where it lay: (mesh, shape, dim) -> placements of the last one.
_layouts = {}


def _remember(x, dim, is_cut):
    key = (x.device_mesh, tuple(x.shape), dim)
    if is_cut:
        _layouts[key] = tuple(x.placements)
    elif _layouts:
        _layouts.pop(key, None)


# ---- slice: output o reads start + o * step ----


def _slice_numbers(size, start, end, step):
    """(start, output size) as torch reads them."""
    if step < 1:
        raise ValueError(f"step is {step}, expected an integer > 0")
    start, end = 0 if start is None else start, size if end is None else end
    start, end = (at + size if at < 0 else at for at in (start, end))
    start = min(max(start, 0), size)
    end = min(max(end, start), size)
    return start, (end - start + step - 1) // step


def _slice_extents(axis, start, out_size, step):
    """What every rank's outputs read."""
    return [
        (start + begin * step, start + (end - 1) * step + 1) if end > begin else (0, 0)
        for begin, end in _all_bounds(axis, out_size)
    ]


def _spread(local, dim, step):
    """Zeros between the columns: the adjoint of a local slice with this step."""
    if step == 1 or local.shape[dim] == 0:
        return local
    shape = _shape_with(local, dim, (local.shape[dim] - 1) * step + 1)
    spread = torch.zeros_like(local.narrow(dim, 0, 1).expand(shape), memory_format=format_of(local))
    aten.slice.Tensor(spread, dim, None, None, step).copy_(local)
    return spread


def _sliced(x, axis, start, out_size, step):
    """A fresh DTensor."""
    local = exchanged(local_of(x), axis, _slice_extents(axis, start, out_size, step))
    if step > 1:
        form = format_of(local)
        local = aten.slice.Tensor(local, axis.dim, None, None, step).contiguous(memory_format=form)
    return wrap_as(local, x.device_mesh, x.placements, _shape_with(x, axis.dim, out_size))


def _is_cut(x, dim):
    """Whether a dim has shards, on however many ranks."""
    return any(
        not isinstance(placement, (Replicate, Partial)) and placement.dim % x.dim() == dim
        for placement in x.placements
    )


@rule(aten.slice.Tensor)
def _slice(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, step = a["self"], a["step"]
    dim = _dim_of(a["dim"], x.dim())
    start, out_size = _slice_numbers(x.shape[dim], a["start"], a["end"], step)
    _remember(x, dim, False)
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    whole = (start, out_size) == (0, x.shape[dim]) and step == 1
    if not whole and _is_cut(x, dim):
        x = settled(x)
        axis = axes_of(x).get(dim)
        if axis:
            _remember(x, dim, True)
            return stands_for_view(_sliced(x, axis, start, out_size, step), x)
    local = op(local_of(x), dim, a["start"], a["end"], step)
    strides = list(x.stride())
    strides[dim] *= step
    return wrap_strided(local, x.device_mesh, x.placements, _shape_with(x, dim, out_size), strides)


@backward_rule(aten.slice_backward.default)
def _slice_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    grad, sizes, step = a["grad_output"], list(a["input_sizes"]), a["step"]
    dim = _dim_of(a["dim"], len(sizes))
    placements = _layouts.get((grad.device_mesh, tuple(sizes), dim))
    if not is_sharded(grad) and placements is None:
        return torchs_own(op, args, kwargs)
    grad = settled(grad) if placements is None else placed_like(grad, grad, placements)
    start, out_size = _slice_numbers(sizes[dim], a["start"], a["end"], step)
    axis, local = axes_of(grad).get(dim), local_of(grad)
    if axis:
        extents = _slice_extents(axis, start, out_size, step)
        local = exchanged_back(_spread(local, dim, step), axis._replace(size=sizes[dim]), extents)
    else:
        local = op(local, _shape_with(local, dim, sizes[dim]), dim, a["start"], a["end"], step)
    return wrap_as(local, grad.device_mesh, grad.placements, sizes)


# ---- select, squeeze: one column, on every rank ----


def _without_dim(placements, dim, ndim):
    """Placements when a dim is gone; what it sharded is replicated."""
    kept = []
    for placement in placements:
        if placement.is_shard():
            at = placement.dim % ndim
            placement = Replicate() if at == dim else Shard(at - (at > dim))
        kept.append(placement)
    return kept


def _selected(x, axis, index):
    local = exchanged(local_of(x), axis, [(index, index + 1)] * axis.world).squeeze(axis.dim)
    shape = [size for dim, size in enumerate(x.shape) if dim != axis.dim]
    placements = _without_dim(x.placements, axis.dim, x.dim())
    return stands_for_view(wrap_as(local, x.device_mesh, placements, shape), x)


def _without_dim_locally(x, local, dim):
    """A view of `x` without a dim that no other rank has a part of."""
    strides = [stride for at, stride in enumerate(x.stride()) if at != dim]
    shape = [size for at, size in enumerate(x.shape) if at != dim]
    return wrap_strided(local, x.device_mesh, _without_dim(x.placements, dim, x.dim()), shape, strides)


@rule(aten.select.int)
def _select(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, dim = a["self"], _dim_of(a["dim"], a["self"].dim())
    _remember(x, dim, False)
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    axis = axes_of(x).get(dim)
    index = _dim_of(a["index"], x.shape[dim], f"index in dim {dim}")
    if axis is None:
        return _without_dim_locally(x, op(local_of(x), dim, index), dim)
    x = settled(x)
    _remember(x, dim, True)
    return _selected(x, axis, index)


@rule(aten.unbind.int)
def _unbind(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, dim = a["self"], _dim_of(a["dim"], a["self"].dim())
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    if dim in axes_of(x):
        return _without_sharded_form(op, args, kwargs, None)
    return [_without_dim_locally(x, local, dim) for local in op(local_of(x), dim)]


@backward_rule(aten.select_backward.default)
def _select_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    grad, sizes, index = a["grad_output"], list(a["input_sizes"]), a["index"]
    dim = _dim_of(a["dim"], len(sizes))
    placements = _layouts.get((grad.device_mesh, tuple(sizes), dim))
    if placements is None:
        return torchs_own(op, args, kwargs)
    local = local_of(placed_like(grad, grad, _without_dim(placements, dim, len(sizes)))).unsqueeze(dim)
    whole = wrap_as(local, grad.device_mesh, placements, sizes)  # for its axes alone
    begin, end = axes_of(whole)[dim].bounds()
    out = local.new_zeros(_shape_with(local, dim, end - begin))
    index %= sizes[dim]
    if begin <= index < end:
        out.narrow(dim, index - begin, 1).copy_(local)
    return wrap_as(out, grad.device_mesh, placements, sizes)


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(op, args, kwargs):
    x, *dims = args
    dims = dims[0] if dims else kwargs.get("dim", range(x.dim()))
    dims = {dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)} if x.dim() else set()
    dims = sorted((dim for dim in dims if x.shape[dim] == 1), reverse=True)
    if not is_sharded(x) or not any(_is_cut(x, dim) for dim in dims):
        return torchs_own(op, args, kwargs)
    for dim in dims:
        axis = axes_of(x).get(dim) if is_sharded(x) else None
        if axis:
            x = _selected(settled(x), axis, 0)
        else:
            x = x.squeeze(dim)
    return x


# ---- split ----


@rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, dim = a["self"], _dim_of(a["dim"], a["self"].dim())
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    total = x.shape[dim]
    if op is aten.split.Tensor:
        length = a["split_size"]
        if length < 0 or (length == 0 and total > 0):
            raise ValueError(f"split_size is {length}, expected an integer > 0 for dim {dim} of size {total}")
        sizes = [min(length, total - start) for start in range(0, max(total, 1), max(length, 1))]
    else:
        sizes = list(a["split_sizes"])
        if any(size < 0 for size in sizes) or sum(sizes) != total:
            raise ValueError(f"split_sizes is {sizes}, expected integers >= 0 that add up to {total}")
    axis = axes_of(x).get(dim)
    if axis is None:
        return [
            wrap_strided(local, x.device_mesh, x.placements, _shape_with(x, dim, size), x.stride())
            for local, size in zip(aten.split_with_sizes.default(local_of(x), sizes, dim), sizes)
        ]
    x, parts, start = settled(x), [], 0
    for size in sizes:
        parts.append(stands_for_view(_sliced(x, axis, start, size, 1), x))
        start += size
    return parts


# ---- cat, stack ----


def _joined_placements(tensors, ndim):
    """Sharded on a mesh dim like the first of the inputs that is."""
    placements = [Replicate()] * tensors[0].device_mesh.ndim
    for x in tensors:
        axes_of(x)  # refuses what it cannot tell
        for mesh_dim, placement in enumerate(x.placements):
            if placement.is_shard() and isinstance(placements[mesh_dim], Replicate):
                shard = Shard(placement.dim % ndim)
                placements[mesh_dim] = shard if shard not in placements else Replicate()
    return placements


def _joined(tensors, dim):
    """torch.cat of DTensors, and plain tensors that count as replicated; a new DTensor."""
    tensors = [settled(x) if isinstance(x, DTensor) else x for x in tensors]
    tensors = [x for x in tensors if x.dim() > 1 or x.shape[0] > 0] or tensors[:1]  # torch skips those
    reference = next(filter(is_sharded, tensors))
    dim = _dim_of(dim, reference.dim())
    for x in tensors:
        if x.dim() != reference.dim() or any(
            size != other for at, (size, other) in enumerate(zip(x.shape, reference.shape)) if at != dim
        ):
            raise ValueError(
                f"tensors have shapes {[tuple(x.shape) for x in tensors]}, expected the same but for dim {dim}"
            )
    placements = _joined_placements([x for x in tensors if isinstance(x, DTensor)], reference.dim())
    total = sum(x.shape[dim] for x in tensors)
    out_shape = _shape_with(reference, dim, total)
    axis = next((axes_of(x)[dim] for x in tensors if is_sharded(x) and dim in axes_of(x)), None)
    if axis and placements[axis.mesh_dim] != Shard(dim):
        axis = None  # another dim has that mesh dim already
    parts, start = [], 0
    for x in tensors:
        x, size = _placed(x, reference, placements, axis), x.shape[dim]
        local = local_of(x)
        if axis:
            cut = [
                tuple(min(max(bound - start, 0), size) for bound in bounds)
                for bounds in _all_bounds(axis, total)
            ]
            local = _fetched(x, local, axis, cut)
        parts.append(local)
        start += size
    return wrap_as(torch.cat(parts, dim), reference.device_mesh, placements, out_shape)


@rule(aten.cat.default)
def _cat(op, args, kwargs):
    a = bound(op, args, kwargs)
    if not any(map(is_sharded, a["tensors"])):
        return torchs_own(op, args, kwargs)
    return _joined(a["tensors"], a["dim"])


@rule(aten.stack.default)
def _stack(op, args, kwargs):
    a = bound(op, args, kwargs)
    tensors = a["tensors"]
    if not any(map(is_sharded, tensors)):
        return torchs_own(op, args, kwargs)
    if any(x.shape != tensors[0].shape for x in tensors):
        raise ValueError(f"tensors have shapes {[tuple(x.shape) for x in tensors]}, expected the same")
    dim = _dim_of(a["dim"], tensors[0].dim() + 1)
    return _joined([x.unsqueeze(dim) for x in tensors], dim)


# ---- writing into a slice, out of place ----


def _scattered(x, source, dim, start, out_size, step):
    """`x` with `source`, a tensor of as many dims, in place of a slice of a sharded dim."""
    x = settled(x)
    axis = axes_of(x)[dim]
    expected = _shape_with(x, dim, out_size)
    if list(source.shape) != expected:
        raise ValueError(f"src has shape {tuple(source.shape)}, expected {tuple(expected)}")
    source = _placed(settled(source) if isinstance(source, DTensor) else source, x, x.placements, axis)
    cut = []  # which part of the source every rank needs
    for begin, end in _all_bounds(axis, axis.size):
        first = min(max(-((start - begin) // step), 0), out_size)
        last = min(max(-((start - end) // step), first), out_size)
        cut.append((first, last))
    part = _fetched(source, local_of(source), axis, cut)
    local = local_of(x).clone()
    if part.shape[dim] > 0:
        first, last = cut[axis.rank]
        at = start + first * step - axis.bounds()[0]
        aten.slice.Tensor(local, dim, at, at + (last - first - 1) * step + 1, step).copy_(part)
    return wrap_as(local, x.device_mesh, x.placements, x.shape)


def _local_scatter(op, a, source):
    """The same along a dim that is not sharded, or beside a plain source: autograd makes such zeros."""
    x = a["self"]
    if not is_sharded(x):
        replicated = [Replicate()] * x.device_mesh.ndim
        a["self"], a["src"] = settled(x), placed_like(a["src"], x, replicated)
        return torchs_own(op, tuple(a.values()), {})
    x = settled(x)
    a["self"], a["src"] = local_of(x), source(local_of(placed_like(source(a["src"], 1), x)), -1)
    return wrap_as(op(*a.values()), x.device_mesh, x.placements, x.shape)


@backward_rule(aten.slice_scatter.default)
def _slice_scatter(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, step = a["self"], a["step"]
    dim = _dim_of(a["dim"], x.dim())
    if not is_sharded(x) or dim not in axes_of(settled(x)):
        return _local_scatter(op, a, lambda source, _: source)
    start, out_size = _slice_numbers(x.shape[dim], a["start"], a["end"], step)
    return _scattered(x, a["src"], dim, start, out_size, step)


@backward_rule(aten.select_scatter.default)
def _select_scatter(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, dim = a["self"], _dim_of(a["dim"], a["self"].dim())
    if not is_sharded(x) or dim not in axes_of(settled(x)):
        return _local_scatter(
            op, a, lambda source, way: source.unsqueeze(dim) if way > 0 else source.squeeze(dim)
        )
    index = _dim_of(a["index"], x.shape[dim], f"index in dim {dim}")
    return _scattered(x, a["src"].unsqueeze(dim), dim, index, 1, 1)


@rule(aten.fill_.Tensor)
def _fill(op, args, kwargs):
    """x[:, 1] = 3 comes here."""
    a = bound(op, args, kwargs)
    x, value = a["self"], a["value"]
    if not is_sharded(x) or any(isinstance(p, Partial) for p in x.placements):
        return torchs_own(op, args, kwargs)
    op(local_of(x), local_of(settled(value)) if isinstance(value, DTensor) else value)
    return x


# ---- flip, roll, rot90 ----


@rule(aten.flip.default)
def _flip(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["self"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    dims = [_dim_of(dim, x.dim(), "a dim of dims") for dim in a["dims"]]
    if len(set(dims)) != len(dims):
        raise ValueError(f"dims is {tuple(a['dims'])}, expected each dim once")
    axes, local = axes_of(x), local_of(x)
    for dim in dims:
        if dim in axes:
            axis = axes[dim]
            extents = [(axis.size - end, axis.size - begin) for begin, end in _all_bounds(axis, axis.size)]
            local = exchanged(local, axis, extents)
    return wrap_as(op(local, dims), x.device_mesh, x.placements, x.shape)


@rule(aten.roll.default)
def _roll(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["self"]
    shifts, dims = ([v] if isinstance(v, int) else list(v) for v in (a["shifts"], a["dims"]))
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    if not dims:
        return _without_sharded_form(op, args, kwargs, None)
    if len(dims) != len(shifts):
        raise ValueError(f"shifts is {shifts} and dims is {dims}, expected as many of both")
    x = settled(x)
    axes, local = axes_of(x), local_of(x)
    for shift, dim in zip(shifts, dims):
        dim = _dim_of(dim, x.dim(), "a dim of dims")
        axis = axes.get(dim)
        if axis is None:
            local = op(local, [shift], [dim])
        elif axis.size:
            shift %= axis.size
            extents = [
                (begin - shift, end - shift) if end > begin else (0, 0)
                for begin, end in _all_bounds(axis, axis.size)
            ]
            local = exchanged(local, axis, extents, periodic=True)
    local = local.clone() if local is local_of(x) else local
    return wrap_as(local, x.device_mesh, x.placements, x.shape)


@rule(aten.rot90.default)
def _rot90(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, turns = a["self"], a["k"] % 4
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    if len(a["dims"]) != 2:
        raise ValueError(f"dims is {tuple(a['dims'])}, expected two dims")
    first, second = (_dim_of(dim, x.dim(), "a dim of dims") for dim in a["dims"])
    if first == second:
        raise ValueError(f"dims is {tuple(a['dims'])}, expected two different dims")
    if turns == 0:
        return x.clone()
    if turns == 2:
        return x.flip((first, second))
    return x.flip(second if turns == 1 else first).transpose(first, second)


# ---- pixel shuffle ----


def _pixels(op, x, factor, out_shape, extents_of, first_of):
    """What both directions share: fetch what this rank's outputs read, the local op, its own outputs.

    extents_of: interval of outputs -> interval that it reads; first_of: the interval's begin -> its first output.
    """
    axes, local = axes_of(x), local_of(x)
    if x.dim() - 3 in axes:
        return _without_sharded_form(op, (x, factor), {}, None)
    spatial = [axis for dim, axis in axes.items() if dim >= x.dim() - 2]
    for axis in spatial:
        extents = [
            extents_of(begin, end) if end > begin else (0, 0)
            for begin, end in _all_bounds(axis, out_shape[axis.dim])
        ]
        local = exchanged(local, axis, extents)
    own = [axes[dim].bounds(size) if dim in axes else (0, size) for dim, size in enumerate(out_shape)]
    if any(end == begin for begin, end in own):
        local = local.new_empty([end - begin for begin, end in own])
    else:
        local = op(local, factor)
    for axis in spatial:
        begin, end = own[axis.dim]
        if local.shape[axis.dim] != end - begin:
            local = local.narrow(axis.dim, begin - first_of(begin), end - begin)
    if not local.is_contiguous(memory_format=format_of(local)):
        local = local.contiguous(memory_format=format_of(local))
    return wrap_as(local, x.device_mesh, x.placements, out_shape)


@rule(aten.pixel_shuffle.default)
def _pixel_shuffle(op, args, kwargs):
    x, r = bound(op, args, kwargs).values()
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    if r < 1 or x.dim() < 3 or x.shape[-3] % (r * r):
        raise ValueError(
            f"upscale_factor is {r} and input has shape {tuple(x.shape)}, expected channels that its square divides"
        )
    *batch, channels, height, width = x.shape
    return _pixels(
        op,
        x,
        r,
        [*batch, channels // (r * r), height * r, width * r],
        lambda begin, end: (begin // r, (end + r - 1) // r),
        lambda begin: begin // r * r,
    )


@rule(aten.pixel_unshuffle.default)
def _pixel_unshuffle(op, args, kwargs):
    x, r = bound(op, args, kwargs).values()
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    if r < 1 or x.dim() < 3 or x.shape[-1] % r or x.shape[-2] % r:
        raise ValueError(
            f"downscale_factor is {r} and input has shape {tuple(x.shape)}, expected height and width that it divides"
        )
    *batch, channels, height, width = x.shape
    return _pixels(
        op,
        x,
        r,
        [*batch, channels * r * r, height // r, width // r],
        lambda begin, end: (begin * r, end * r),
        lambda begin: begin,
    )


# ---- channel shuffle, repeat: local, as long as what they touch is whole ----


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def _channel_shuffle(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, groups = a["self"], a["groups"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    if x.dim() < 3 or groups < 1 or x.shape[1] % groups:
        raise ValueError(
            f"groups is {groups} and input has shape {tuple(x.shape)}, expected a divisor of dim 1"
        )
    if 1 in axes_of(x):
        return _without_sharded_form(op, args, kwargs, None)
    local = local_of(x)
    local = op(local, groups) if local.numel() else local.clone()
    return wrap_as(local, x.device_mesh, x.placements, x.shape)


@rule(aten.repeat.default)
def _repeat(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, repeats = a["self"], list(a["repeats"])
    more = len(repeats) - x.dim()
    if not is_sharded(x) or more < 0:
        return torchs_own(op, args, kwargs)
    x = settled(x)
    for dim in axes_of(x):
        if repeats[more + dim] > 1:
            x = _joined([x] * repeats[more + dim], dim)
            repeats[more + dim] = 1
        elif repeats[more + dim] == 0:
            return torchs_own(op, args, kwargs)
    placements = [Shard(p.dim % x.dim() + more) if p.is_shard() else p for p in x.placements]
    shape = [count * size for count, size in zip(repeats, [1] * more + list(x.shape))]
    return wrap_as(op(local_of(x), repeats), x.device_mesh, placements, shape)


# ---- sliding windows ----


def _unfold_extents(axis, outs, size, step):
    return [
        (begin * step, (end - 1) * step + size) if end > begin else (0, 0)
        for begin, end in _all_bounds(axis, outs)
    ]


@rule(aten.unfold.default)
def _unfold(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, size, step = a["self"], a["size"], a["step"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    dim = _dim_of(a["dimension"], x.dim(), "dimension")
    if step < 1 or not 0 <= size <= x.shape[dim]:
        raise ValueError(
            f"size is {size} and step is {step}, expected at most {x.shape[dim]}, the size of dim {dim}, and > 0"
        )
    outs = (x.shape[dim] - size) // step + 1
    shape = [*_shape_with(x, dim, outs), size]
    axis, local = axes_of(x).get(dim), local_of(x)
    placements = [Shard(p.dim % x.dim()) if p.is_shard() else p for p in x.placements]
    if axis is None:
        strides = [*x.stride(), x.stride(dim)]
        strides[dim] *= step
        return wrap_strided(op(local, dim, size, step), x.device_mesh, placements, shape, strides)
    begin, end = axis.bounds(outs)
    local = exchanged(local, axis, _unfold_extents(axis, outs, size, step))
    if end == begin:
        local = local.new_empty([*_shape_with(local, dim, 0), size])
    else:
        local = op(local, dim, size, step).contiguous()
    return stands_for_view(wrap_as(local, x.device_mesh, placements, shape), x)


@backward_rule(aten.unfold_backward.default)
def _unfold_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    grad, sizes, size, step = a["grad_in"], list(a["input_sizes"]), a["size"], a["step"]
    if not is_sharded(grad):
        return torchs_own(op, args, kwargs)
    grad, dim = settled(grad), _dim_of(a["dim"], len(sizes))
    axes, local = axes_of(grad), local_of(grad)
    if len(sizes) in axes:
        return _without_sharded_form(op, args, kwargs, None)
    axis = axes.get(dim)
    local_sizes = list(local.shape[:-1])
    if axis is None:
        local_sizes[dim] = sizes[dim]
        local = op(local, local_sizes, dim, size, step)
    else:
        extents = _unfold_extents(axis, grad.shape[dim], size, step)
        local_sizes[dim] = extents[axis.rank][1] - extents[axis.rank][0]
        if local.numel() == 0:
            local = local.new_zeros(local_sizes)
        else:
            local = op(local, local_sizes, dim, size, step)
        local = exchanged_back(local, axis._replace(size=sizes[dim]), extents)
    placements = [Shard(p.dim % grad.dim()) if p.is_shard() else p for p in grad.placements]
    return wrap_as(local, grad.device_mesh, placements, sizes)
