"""Sums, means, variances, extrema, norms, softmax and their kin over sharded dims.

Each rank reduces its shard; the small results of all ranks of an axis meet as the rows of one tensor, which every rank
reduces alike, so that the result is the same on all of them, bit for bit: Replicate, not Partial, since torch adds
e.g. a number to every rank's part of a Partial sum. Dims that are not reduced stay sharded. A rank whose shard is empty
contributes the reduction's neutral element.

* Half precision is summed in float32.
* Variances are combined by Chan's formula, with the true number of elements of each shard.
* Backward: autograd expands the small gradient to the input's size. `_expand` makes that a sharded tensor where it
  remembers how an input of this size was sharded.
"""

import collections
import math

import torch

from .. import _ops
from .._dtensor import DTensor, Partial, Replicate, Shard, is_exactly_shard, local_of, wrap_strided
from .._layout import axes_of, exchanged, is_sharded, moved_to, placed_like, settled, wrap_as
from ._registry import backward_rule, bound, rule, torchs_own

aten = torch.ops.aten

_WHOLE = Replicate()
_HALVES = (torch.float16, torch.bfloat16)


def _accumulation_dtype(dtype):
    return torch.float32 if dtype in _HALVES else dtype


# ---- what a reduction of a DTensor is made of ----


def _is_plainly_sharded(x):
    """Sharded, each dim by one mesh dim. What torch or a program shards in other ways is left to torch."""
    if not is_sharded(x):
        return False
    shards = [p for p in x.placements if not isinstance(p, (Replicate, Partial))]
    return all(map(is_exactly_shard, shards)) and len({p.dim % x.dim() for p in shards}) == len(shards)


def _as_dims(dims, ndim):
    """Sorted, from 0; None and [] are all dims."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(ndim))
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if any(not -ndim <= dim < ndim for dim in dims) or len({dim % ndim for dim in dims}) != len(dims):
        raise ValueError(f"dim is {dims}, expected different dims from {-ndim} to {ndim - 1}")
    return tuple(sorted(dim % ndim for dim in dims))


def _rows(local, axis):
    """The tensors that the ranks of an axis have, all of one shape, as the rows of one. For small ones."""
    row = local.reshape(1, -1)
    rows = exchanged(row, axis._replace(dim=0, size=axis.world), [(0, axis.world)] * axis.world)
    return rows.view(axis.world, *local.shape)


class _Reduction:
    """Of a plainly sharded DTensor over `dims`. Local results keep the reduced dims, with size 1."""

    def __init__(self, x, dims, keepdim=False):
        x = settled(x)
        self.x, self.local, self.keepdim = x, local_of(x), keepdim
        self.dims = _as_dims(dims, x.dim())
        axes = axes_of(x)
        self.axes = [axes[dim] for dim in self.dims if dim in axes]
        self.count = math.prod(x.shape[dim] for dim in self.dims)
        _remember(x)

    @property
    def lacks_elements(self):
        """Whether this rank has nothing to reduce, but another has."""
        return self.count > 0 and any(self.local.shape[dim] == 0 for dim in self.dims)

    def filled(self, value, dtype=None):
        """A local result of one value."""
        shape = [1 if dim in self.dims else size for dim, size in enumerate(self.local.shape)]
        return self.local.new_full(shape, value, dtype=dtype)

    def combined(self, local, combine):
        """combine: rows -> their reduction over dim 0."""
        for axis in self.axes:
            local = combine(_rows(local, axis))
        return local

    def wrapped(self, local, reduced_over=_WHOLE):
        """reduced_over: the placement on the mesh dims that the reduced dims are sharded by."""
        x, placements = self.x, []
        for placement in x.placements:
            dim = placement.dim % x.dim() if isinstance(placement, Shard) else None
            if dim is None:
                placements.append(Replicate())
            elif dim in self.dims:
                placements.append(reduced_over)
            else:
                placements.append(
                    Shard(dim if self.keepdim else dim - sum(reduced < dim for reduced in self.dims))
                )
        if self.keepdim:
            shape = [1 if dim in self.dims else size for dim, size in enumerate(x.shape)]
        else:
            shape = [size for dim, size in enumerate(x.shape) if dim not in self.dims]
            local = local.reshape([size for dim, size in enumerate(local.shape) if dim not in self.dims])
        return wrap_as(local, x.device_mesh, placements, shape)


def _reducing(function):
    """A rule from function(a, r): a, the arguments by name; r, the _Reduction. It gives local results, or a DTensor."""

    def run(op, args, kwargs):
        a = bound(op, args, kwargs)
        x = a["self"]
        if not _is_plainly_sharded(x):
            _remember(x)
            return torchs_own(op, args, kwargs)
        r = _Reduction(x, a.get("dim"), a.get("keepdim", False))
        result = function(a, r)
        if isinstance(result, DTensor):
            return result
        return tuple(map(r.wrapped, result)) if isinstance(result, tuple) else r.wrapped(result)

    return run


# ---- sums ----


def _summed(r, local, dtype, op=aten.sum.dim_IntList):
    """The sum over the reduced dims of a tensor like r.local, in `dtype`, before it is rounded to it."""
    local = op(local, r.dims, True, dtype=_accumulation_dtype(dtype))
    return r.combined(local, lambda rows: rows.sum(0))


def _sum_dtype(a, x):
    integral = not (x.dtype.is_floating_point or x.dtype.is_complex)
    return a.get("dtype") or (torch.int64 if integral else x.dtype)


# Nodes of an autograd graph that pass a Partial gradient on as it is.
_LINEAR = {
    "ExpandBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}


def _is_parameters_gradient(r):
    """Whether autograd sums a gradient over what a parameter was broadcast to, as for a scale per channel. It may stay
    Partial, like that of a convolution's weight, to be reduced with all others; a sum that the program asks for not."""
    node = torch._C._current_autograd_node()
    if node is None or torch.is_grad_enabled():
        return False
    count = math.prod(size for dim, size in enumerate(r.x.shape) if dim not in r.dims)
    for target, _ in node.next_functions:
        while target is not None and target.name() in _LINEAR:
            target = target.next_functions[0][0]
        variable = getattr(target, "variable", None)  # of an AccumulateGrad
        is_parameter = isinstance(variable, DTensor) and isinstance(variable, torch.nn.Parameter)
        if is_parameter and variable.numel() == count and not is_sharded(variable):
            return True
    return False


@rule(aten.sum.default, aten.sum.dim_IntList)
@_reducing
def _sum(a, r):
    dtype = _sum_dtype(a, r.x)
    if r.axes and _is_parameters_gradient(r):
        local = aten.sum.dim_IntList(r.local, r.dims, True, dtype=_accumulation_dtype(dtype))
        return r.wrapped(local.to(dtype), Partial())
    return _summed(r, r.local, dtype).to(dtype)


@rule(aten.nansum.default)
@_reducing
def _nansum(a, r):
    dtype = _sum_dtype(a, r.x)
    return _summed(r, r.local, dtype, aten.nansum.default).to(dtype)


@rule(aten.mean.default, aten.mean.dim)
@_reducing
def _mean(a, r):
    dtype = a["dtype"] or r.x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        aten.mean.default(r.local, dtype=a["dtype"])  # raises
    return (_summed(r, r.local, dtype) / r.count).to(dtype)


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
@_reducing
def _count_nonzero(a, r):
    return _summed(r, r.local != 0, torch.int64)


@rule(aten.prod.default, aten.prod.dim_int)
@_reducing
def _prod(a, r):
    dtype = _sum_dtype(a, r.x)
    local = r.local.to(_accumulation_dtype(dtype))
    for dim in r.dims:
        local = local.prod(dim, keepdim=True)
    return r.combined(local, lambda rows: rows.prod(0)).to(dtype)


@rule(aten.any.default, aten.any.dim, aten.any.dims)
@_reducing
def _any(a, r):
    return r.combined(aten.any.dims(r.local, r.dims, True), lambda rows: rows.any(0))


@rule(aten.all.default, aten.all.dim, aten.all.dims)
@_reducing
def _all(a, r):
    return r.combined(aten.all.dims(r.local, r.dims, True), lambda rows: rows.all(0))


# ---- variance ----


def _moments(r):
    """(mean, sum of squared deviations from it), in at least float32."""
    local = r.local.to(_accumulation_dtype(r.local.dtype))
    sizes = {dim: local.shape[dim] for dim in r.dims}
    if math.prod(sizes.values()) == 0:
        mean = squares = r.filled(0, local.dtype)
    else:
        variance, mean = torch.var_mean(local, r.dims, correction=0, keepdim=True)
        squares = variance * math.prod(sizes.values())
    for axis in r.axes:
        means, all_squares = _rows(torch.stack([mean, squares]), axis).unbind(1)
        rest = math.prod(size for dim, size in sizes.items() if dim != axis.dim)
        bounds = [axis.bounds(rank=rank) for rank in range(axis.world)]
        counts = [rest * (end - begin) for begin, end in bounds]
        weights = torch.tensor(counts, dtype=mean.dtype, device=mean.device).view(-1, *[1] * mean.dim())
        mean = (weights * means).sum(0) / max(1, sum(counts))
        squares = all_squares.sum(0) + (weights * (means - mean) ** 2).sum(0)
        sizes[axis.dim] = axis.size
    return mean, squares


def _variance(with_mean, root):
    def function(a, r):
        dtype = r.x.dtype
        if not dtype.is_floating_point:
            aten.var.correction(r.local)  # raises for integers
            raise ValueError(f"input has dtype {dtype}, expected a real one where a sharded dim is reduced")
        correction = 1 if a["correction"] is None else a["correction"]
        mean, squares = _moments(r)
        result = squares / max(0, r.count - correction)
        if r.count == 0:
            mean, result = mean * math.nan, result * math.nan
        result = (result.sqrt() if root else result).to(dtype)
        return (result, mean.to(dtype)) if with_mean else result

    return _reducing(function)


rule(aten.var.correction)(_variance(False, False))
rule(aten.std.correction)(_variance(False, True))
rule(aten.var_mean.correction)(_variance(True, False))
rule(aten.std_mean.correction)(_variance(True, True))


# ---- extrema ----


def _limit(dtype, lowest):
    if dtype == torch.bool:
        return not lowest
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max


def _extremum(r, largest):
    reduce = aten.amax.default if largest else aten.amin.default
    if r.lacks_elements:
        local = r.filled(_limit(r.local.dtype, lowest=largest))
    else:
        local = reduce(r.local, r.dims, True)
    return r.combined(local, lambda rows: reduce(rows, [0]))


@rule(aten.amax.default, aten.max.default)
@_reducing
def _amax(a, r):
    return _extremum(r, True)


@rule(aten.amin.default, aten.min.default)
@_reducing
def _amin(a, r):
    return _extremum(r, False)


@rule(aten.aminmax.default)
@_reducing
def _aminmax(a, r):
    return _extremum(r, False), _extremum(r, True)


def _global_flat(r, index):
    """A flat index over the local elements as one over all elements."""
    axes, flat, rest = axes_of(r.x), 0, index
    for dim, size in enumerate(r.x.shape):
        below = math.prod(r.local.shape[dim + 1 :])
        at = torch.div(rest, below, rounding_mode="floor")
        rest = rest - at * below
        flat = flat * size + at + (axes[dim].bounds()[0] if dim in axes else 0)
    return flat


def _selected(r, largest, flat):
    """(values, global indices) of the extrema along the one dim, or, if `flat`, over all. The first of equal ones."""
    select = aten.max.dim if largest else aten.min.dim
    if r.lacks_elements:
        values = r.filled(_limit(r.local.dtype, lowest=largest))
        indices = r.filled(r.count, torch.int64)  # after all others
    elif flat:
        values, indices = select(r.local.reshape(-1), 0)
        shape = [1] * r.local.dim()
        values, indices = values.reshape(shape), _global_flat(r, indices).reshape(shape)
    else:
        values, indices = select(r.local, r.dims[0], True)
        indices = indices + sum(axis.bounds()[0] for axis in r.axes)
    reduce = aten.amax.default if largest else aten.amin.default
    for axis in r.axes:
        all_values, all_indices = _rows(values, axis), _rows(indices, axis)
        values = reduce(all_values, [0])
        reached = (all_values == values) | ((all_values != all_values) & (values != values))  # NaN
        indices = torch.where(reached, all_indices, r.count).amin(0)
    return values, indices


@rule(aten.max.dim)
@_reducing
def _max_dim(a, r):
    return _selected(r, True, False)


@rule(aten.min.dim)
@_reducing
def _min_dim(a, r):
    return _selected(r, False, False)


@rule(aten.argmax.default)
@_reducing
def _argmax(a, r):
    return _selected(r, True, a["dim"] is None)[1]


@rule(aten.argmin.default)
@_reducing
def _argmin(a, r):
    return _selected(r, False, a["dim"] is None)[1]


# ---- norms, logarithms of sums ----


def _vector_norm(a, r):
    order = a["ord"] if "ord" in a else a.get("p")
    order = 2 if order is None else order
    dtype = a.get("dtype") or r.x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        aten.linalg_vector_norm.default(r.local)  # raises
    wide = _accumulation_dtype(dtype)
    if r.lacks_elements:
        real = torch.empty(0, dtype=wide).abs().dtype
        local = r.filled(math.inf if order < 0 else 0, real)
    else:
        local = aten.linalg_vector_norm.default(r.local, order, r.dims, True, dtype=wide)
    if order == 0:
        local = r.combined(local, lambda rows: rows.sum(0))
    else:  # the norm of the shards' norms
        local = r.combined(local, lambda rows: aten.linalg_vector_norm.default(rows, order, [0]))
    return local.to(torch.empty(0, dtype=dtype).abs().dtype)


rule(
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
    aten.norm.ScalarOpt_dtype,
)(_reducing(_vector_norm))


@rule(aten.dist.default)
def _dist(op, args, kwargs):
    a = bound(op, args, kwargs)
    if not any(map(is_sharded, (a["self"], a["other"]))):
        return torchs_own(op, args, kwargs)
    return aten.linalg_vector_norm.default(a["self"] - a["other"], a["p"])


@rule(aten.logsumexp.default)
@_reducing
def _logsumexp(a, r):
    local = aten.logsumexp.default(r.local, r.dims, True)
    dtype = local.dtype
    local = local.to(_accumulation_dtype(dtype))
    return r.combined(local, lambda rows: rows.logsumexp(0)).to(dtype)


# ---- softmax ----


def _along(x, dim):
    return _Reduction(x, dim, True)


def _softmax_parts(r):
    """(x - maximum, its exponential, the sum of that) of a softmax along a sharded dim, in at least float32."""
    local = r.local.to(_accumulation_dtype(r.local.dtype))
    (axis,) = r.axes
    top = r.filled(-math.inf, local.dtype) if r.lacks_elements else local.amax(r.dims, True)
    total = (local - torch.where(top == -math.inf, 0, top)).exp_().sum(r.dims, True)
    tops, totals = _rows(torch.stack([top, total]), axis).unbind(1)
    top = tops.amax(0)
    total = (totals * (tops - top).exp()).sum(0)
    shifted = local - top
    return shifted, total


def _softmax_rule(logarithm):
    def run(op, args, kwargs):
        a = bound(op, args, kwargs)
        x = a["self"]
        if not _is_plainly_sharded(x):
            return torchs_own(op, args, kwargs)
        r = _along(x, a["dim"])
        dtype = torch.float32 if a["half_to_float"] else r.x.dtype
        if r.axes and r.count:
            shifted, total = _softmax_parts(r)
            out = shifted.sub_(total.log()) if logarithm else shifted.exp_().div_(total)
            out = out.to(dtype)
        else:
            out = op(r.local, r.dims[0], a["half_to_float"])
        return wrap_as(out, r.x.device_mesh, r.x.placements, r.x.shape)

    return run


rule(aten._softmax.default)(_softmax_rule(False))
rule(aten._log_softmax.default)(_softmax_rule(True))


def _softmax_backward_rule(logarithm):
    def run(op, args, kwargs):
        a = bound(op, args, kwargs)
        out = a["output"]
        if not _is_plainly_sharded(out):
            return torchs_own(op, args, kwargs)
        r = _along(out, a["dim"])
        grad, out, dtype = local_of(placed_like(a["grad_output"], r.x)), r.local, a["input_dtype"]
        if not r.axes:
            result = op(grad, out, r.dims[0], dtype)
        elif logarithm:
            total = _summed(r, grad, grad.dtype)
            result = (grad - out.to(total.dtype).exp() * total).to(dtype)
        else:
            product = grad * out
            total = _summed(r, product, product.dtype)
            result = (product - out * total).to(dtype)
        return wrap_as(result, r.x.device_mesh, r.x.placements, r.x.shape)

    return run


backward_rule(aten._softmax_backward_data.default)(_softmax_backward_rule(False))
backward_rule(aten._log_softmax_backward_data.default)(_softmax_backward_rule(True))


# ---- backward: what grows to the size of an activation grows sharded ----

_REMEMBERED = 256  # shapes, for each mesh

_seen = collections.defaultdict(
    collections.OrderedDict
)  # mesh -> {shape: placements, None if not always the same}


def _remember(x):
    """How an input of this shape lies. Only a hint, but the same on all ranks of the mesh: they run the same ops."""
    if not isinstance(x, DTensor) or not all(isinstance(size, int) for size in x.shape):
        return
    seen, shape = _seen[x.device_mesh], tuple(x.shape)
    placements = tuple(x.placements)
    seen[shape] = placements if seen.pop(shape, placements) == placements else None
    if len(seen) > _REMEMBERED:
        seen.popitem(last=False)


def _remembered(mesh, shape):
    return _seen[mesh].get(tuple(shape)) if all(isinstance(size, int) for size in shape) else None


def _grown_placements(x, shape):
    """The remembered placements as far as those of `x` leave the dims free, None where that shards nothing more."""
    hint, new = _remembered(x.device_mesh, shape), len(shape) - x.dim()
    if hint is None:
        return None
    kept = []
    for placement in x.placements:
        if isinstance(placement, (Replicate, Partial)):
            kept.append(None)
        elif is_exactly_shard(placement) and x.shape[placement.dim] == shape[placement.dim + new]:
            kept.append(Shard(placement.dim % x.dim() + new))
        else:
            return None
    placements = [
        own or (wanted if is_exactly_shard(wanted) and wanted not in kept else Replicate())
        for own, wanted in zip(kept, hint)
    ]
    more = any(own is None and isinstance(given, Shard) for own, given in zip(kept, placements))
    return placements if more else None


def _own_bounds(mesh, mesh_dim, size):
    return _ops.shard_bounds(size, mesh.size(mesh_dim), mesh.get_coordinate()[mesh_dim])


def _whole_where_it_grows(x, shape):
    """The one column of a sharded dim that is to be expanded, on every rank."""
    if not is_sharded(x) or len(shape) != x.dim():
        return x
    placements = [
        Replicate() if is_exactly_shard(p) and x.shape[p.dim] == 1 and shape[p.dim % x.dim()] != 1 else p
        for p in x.placements
    ]
    return moved_to(x, placements)


@rule(aten.expand.default)
def _expand(op, args, kwargs):
    """Any sharding of an expanded tensor is right, and costs nothing: the remembered one fits what comes next."""
    x, size = args[:2]
    new = len(size) - x.dim()
    shape = [x.shape[dim - new] if length == -1 else length for dim, length in enumerate(size)]
    x = _whole_where_it_grows(x, shape[new:])
    placements = _grown_placements(x, shape) if new >= 0 else None
    if placements is None:
        return torchs_own(op, (x, *args[1:]), kwargs)
    x, mesh = settled(x), x.device_mesh
    local = local_of(x)
    local_shape = list(shape)
    for mesh_dim, (before, after) in enumerate(zip(x.placements, placements)):
        if not isinstance(after, Shard):
            continue
        begin, end = _own_bounds(mesh, mesh_dim, shape[after.dim])
        local_shape[after.dim] = end - begin
        own = after.dim - new
        if isinstance(before, Replicate) and own >= 0 and x.shape[own] == shape[after.dim]:
            local = local.narrow(own, begin, end - begin)
    strides = [0] * new + [
        0 if x.shape[dim] != shape[dim + new] else stride for dim, stride in enumerate(x.stride())
    ]
    return wrap_strided(local.expand(local_shape), mesh, placements, shape, strides)


@backward_rule(aten.scatter.src)
def _scatter(op, args, kwargs):
    """The backward of max.dim and its kin: one value goes to one place along a dim of zeros."""
    target, dim, index, source = args
    if not isinstance(index, DTensor) or not isinstance(source, DTensor):
        return torchs_own(op, args, kwargs)
    dim = dim % target.dim()
    index = settled(index)
    mesh, shape = index.device_mesh, list(target.shape)
    alike = index.shape == source.shape and all(
        d == dim or index.shape[d] == size for d, size in enumerate(shape)
    )
    hint = _remembered(mesh, shape) or index.placements
    # What index is sharded in stays; else as remembered, along `dim` too where it has one entry there.
    placements = [
        own if isinstance(own, Shard) else wanted if is_exactly_shard(wanted) else Replicate()
        for own, wanted in zip(index.placements, hint)
    ]
    dims = [p.dim % len(shape) for p in placements if not isinstance(p, Replicate)]
    if (
        not alike
        or not dims
        or len(set(dims)) != len(dims)
        or not all(isinstance(p, Replicate) or is_exactly_shard(p) for p in placements)
    ):
        return torchs_own(op, args, kwargs)
    if dim in dims and (index.shape[dim] != 1 or shape[dim] == 1):
        return torchs_own(op, args, kwargs)
    beside = [Replicate() if isinstance(p, Shard) and p.dim % len(shape) == dim else p for p in placements]
    target = placed_like(target, index, placements)
    index, source = (local_of(placed_like(t, index, beside)) for t in (index, source))
    local = local_of(target)
    if dim in dims:
        axis = axes_of(target).get(dim)
        begin, end = axis.bounds() if axis else (0, shape[dim])
        where = torch.arange(begin, end, device=local.device).view(
            [-1 if d == dim else 1 for d in range(len(shape))]
        )
        out = torch.where(where == index, source, local)
    else:
        out = op(local, dim, index, source)
    return wrap_as(out, mesh, placements, shape)
