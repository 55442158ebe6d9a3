"""Resampling: nearest, linear, cubic, antialiased, forward and backward.

All of it is separable: along a dim, each output is a weighted sum of a few inputs, its taps. The planner
(csrc/resize.c) has them as ATen has them. Along a sharded dim a rank fetches the interval that its outputs read, and
sums the taps; backward scatters the gradient to the interval, whose parts go home and are added. The other dims are
left to ATen, for which the sharded ones keep their size. Not so for nearest, where ATen has two kernels that do not
always pick the same pixel and takes one by the size of the whole; nor for the antialiased modes, which ATen gets wrong
where one column is left. Those take taps in all dims.
"""

import functools

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import _C, _ops
from .._dtensor import local_of, strides_of, wrap_strided
from .._layout import axes_of, exchanged, exchanged_back, is_sharded, settled, wrap_as
from ._registry import backward_rule, bound, rule, torchs_own

aten = torch.ops.aten

# ---- taps ----


@functools.lru_cache(maxsize=512)
def _fused():
    return torch.backends.cpu.get_cpu_capability() != "DEFAULT"


class Taps:
    """The taps of one dim: `count` of them for each output."""

    def __init__(
        self, mode, size, out_size, align_corners=False, scale=None, single=False, channels_last=False
    ):
        self.size, self.out_size = size, out_size
        self._numbers = (mode, size, out_size, align_corners, scale, single, channels_last, _fused())
        self.count, indices, weights = _C.resize(*self._numbers)
        with _disable_current_modes():  # plain tensors also while a graph is traced: they are kept
            self._indices = torch.frombuffer(bytearray(indices), dtype=torch.int64).view(out_size, self.count)
            self._weights = torch.frombuffer(bytearray(weights), dtype=torch.float64).view(
                out_size, self.count
            )
            self.picks = self.count == 1 and bool((self._weights == 1).all())  # nothing to multiply

    def reads(self, begin, end):
        """The interval of inputs that the outputs [begin, end) read."""
        return _C.resize_reads(*self._numbers, begin, end) if end > begin else (0, 0)

    def rows(self, begin, end, offset, like):
        """(index - offset, weight) of each tap of the outputs [begin, end), on the device of `like`."""
        with _disable_current_modes():
            indices, weights = self._indices[begin:end] - offset, self._weights[begin:end]
        indices, weights = _constant(indices, like), _constant(weights, like).to(_accumulation(like.dtype))
        return list(zip(indices.unbind(1), weights.unbind(1)))

    def matrix(self, begin, end, like):
        """The dense (end - begin, out_size) part of the map that the inputs [begin, end) have."""
        with _disable_current_modes():
            rows = torch.zeros(self.size, self.out_size, dtype=torch.float64)
            outputs = torch.arange(self.out_size).unsqueeze(1).expand_as(self._indices)
            rows.index_put_((self._indices, outputs), self._weights, accumulate=True)
            part = rows[begin:end]
        return _constant(part, like).to(_accumulation(like.dtype))


def _constant(tensor, like):
    """A plain tensor on the device of `like`; while a graph is traced, as a constant of it."""
    if torch._guards.detect_fake_mode(like) is None:
        return tensor.to(like.device)
    with _disable_current_modes():
        values = tensor.tolist()
    return torch.tensor(values, dtype=tensor.dtype, device=like.device).view(tensor.shape)


taps_of = functools.lru_cache(maxsize=512)(Taps)


def _accumulation(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _channels_innermost(tensor):
    """A view without memory format, and the function that undoes it: index_select and its kin return contiguous
    tensors."""
    if _ops.is_channels_last(tensor):
        return tensor.movedim(1, -1), lambda dim: dim - 1, lambda result: result.movedim(-1, 1)
    return tensor, lambda dim: dim, lambda result: result


def _along(weight, dim, ndim):
    return weight.view([-1 if d == dim else 1 for d in range(ndim)])


def sum_taps(tensor, dim, taps, begin, end, offset):
    """Outputs [begin, end) along `dim` of a tensor that starts at `offset` of the whole dim."""
    tensor, placed, restored = _channels_innermost(tensor)
    dim = placed(dim)
    if taps.picks:
        return restored(tensor.index_select(dim, taps.rows(begin, end, offset, tensor)[0][0]))
    source, out = tensor.to(_accumulation(tensor.dtype)), None
    for index, weight in taps.rows(begin, end, offset, tensor):
        part, weight = source.index_select(dim, index), _along(weight, dim, tensor.dim())
        out = part.mul_(weight) if out is None else out.addcmul_(part, weight)
    return restored(out.to(tensor.dtype))


def scatter_taps(grad, dim, taps, begin, end, interval):
    """The adjoint of `sum_taps`: the gradient of the interval that the outputs [begin, end) read."""
    grad, placed, restored = _channels_innermost(grad)
    dim = placed(dim)
    shape = list(grad.shape)
    shape[dim] = interval[1] - interval[0]
    source = grad.to(_accumulation(grad.dtype))
    out = source.new_zeros(shape)
    for index, weight in taps.rows(begin, end, interval[0], grad):
        out.index_add_(dim, index, source if taps.picks else source * _along(weight, dim, grad.dim()))
    return restored(out.to(grad.dtype))


# ---- one dim after the other ----


def forward_dim(local, dim, taps, axis):
    """Resamples one dim; sharded when it has an axis."""
    if axis is None:
        return sum_taps(local, dim, taps, 0, taps.out_size, 0)
    extents = [taps.reads(*axis.bounds(taps.out_size, rank)) for rank in range(axis.world)]
    extended = exchanged(local, axis, extents)
    return sum_taps(extended, dim, taps, *axis.bounds(taps.out_size), extents[axis.rank][0])


def backward_dim(grad, dim, taps, axis):
    """The adjoint of `forward_dim`. `axis` is the input's."""
    if axis is None:
        return scatter_taps(grad, dim, taps, 0, taps.out_size, (0, taps.size))
    extents = [taps.reads(*axis.bounds(taps.out_size, rank)) for rank in range(axis.world)]
    extended = scatter_taps(grad, dim, taps, *axis.bounds(taps.out_size), extents[axis.rank])
    return exchanged_back(extended, axis, extents)


# ---- the ops ----

_MODES = {  # of each op: mode, spatial dims
    "upsample_nearest1d": ("nearest", 1),
    "upsample_nearest2d": ("nearest", 2),
    "upsample_nearest3d": ("nearest", 3),
    "_upsample_nearest_exact1d": ("nearest-exact", 1),
    "_upsample_nearest_exact2d": ("nearest-exact", 2),
    "_upsample_nearest_exact3d": ("nearest-exact", 3),
    "upsample_linear1d": ("linear", 1),
    "upsample_bilinear2d": ("linear", 2),
    "upsample_trilinear3d": ("linear", 3),
    "upsample_bicubic2d": ("cubic", 2),
    "_upsample_bilinear2d_aa": ("linear-aa", 2),
    "_upsample_bicubic2d_aa": ("cubic-aa", 2),
}


def _takes_other_kernel(x, shape, n):
    """Which of ATen's two CPU kernels for nearest it would take for the whole tensor: see csrc/resize.h."""
    if n == 1:
        return False
    wide = _ops.is_channels_last(x) and x.shape[1] > 3
    return wide or (n == 2 and sum(shape[2:]) <= 128)


class _Resize:
    """The numbers of one call, for an input of the global shape `shape`."""

    def __init__(self, name, shape, a, dtype, other_kernel):
        self.mode, self.n = _MODES[name]
        if len(shape) != self.n + 2:
            raise ValueError(f"input has {len(shape)} dims, expected {self.n + 2} for {name}")
        self.sizes, self.out_sizes = tuple(shape[2:]), tuple(a["output_size"])
        if len(self.out_sizes) != self.n or any(size < 1 for size in (*self.sizes, *self.out_sizes)):
            raise ValueError(
                f"input has spatial sizes {self.sizes} and output_size is {self.out_sizes}, expected {self.n} sizes "
                "> 0 each"
            )
        names = ("scales",) if self.n == 1 else ("scales_d", "scales_h", "scales_w")[-self.n :]
        self.scales = [a[key] for key in names]
        self.align_corners = a.get("align_corners", False)
        self._options = (dtype != torch.float64, other_kernel)
        self.out_shape = (*shape[:2], *self.out_sizes)

    def taps(self, index):
        return taps_of(
            self.mode,
            self.sizes[index],
            self.out_sizes[index],
            self.align_corners,
            self.scales[index],
            *self._options,
        )

    def by_taps(self, axes):
        """The spatial dims, from 0, that are not left to ATen."""
        alone = self.mode in ("linear", "cubic")
        return [index for index in range(self.n) if not alone or 2 + index in axes]

    def whole_dims(self, local_sizes, axes):
        """ATen's arguments for the other dims, None where none of them changes: (out sizes, in sizes, scales)."""
        others = [index for index in range(self.n) if index not in self.by_taps(axes)]
        if not others:
            return None
        scales = [self.scales[index] if index in others else None for index in range(self.n)]
        out = [self.out_sizes[index] if index in others else local_sizes[index] for index in range(self.n)]
        into = [self.sizes[index] if index in others else local_sizes[index] for index in range(self.n)]
        return out, into, scales


def _forward(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["self"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    n = _MODES[op._opname][1]
    resize = _Resize(
        op._opname, x.shape, a, x.dtype, _takes_other_kernel(x, (*x.shape[:2], *a["output_size"]), n)
    )
    axes, local = axes_of(x), local_of(x)
    for index in resize.by_taps(axes):
        local = forward_dim(local, 2 + index, resize.taps(index), axes.get(2 + index))
    whole = resize.whole_dims(local.shape[2:], axes)
    if whole is not None and local.numel() > 0:
        out, _, scales = whole
        local = op(local, out, resize.align_corners, *scales)
    elif whole is not None:
        local = local.new_empty((*local.shape[:2], *whole[0]))
    return wrap_as(local, x.device_mesh, x.placements, resize.out_shape)


def _backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    grad, shape = a["grad_output"], tuple(a["input_size"])
    if not is_sharded(grad):
        return torchs_own(op, args, kwargs)
    grad = settled(grad)
    # ATen's backward of nearest has one kernel only.
    resize = _Resize(op._opname.removesuffix("_backward"), shape, a, grad.dtype, True)
    meta = local_of(grad).new_empty(0)
    source = wrap_strided(meta, grad.device_mesh, grad.placements, shape, strides_of(shape, False))
    axes, local = axes_of(source), local_of(grad)
    whole = resize.whole_dims(local.shape[2:], axes)
    if whole is not None and local.numel() > 0:
        out, into, scales = whole
        local = op(local, out, [*local.shape[:2], *into], resize.align_corners, *scales)
    elif whole is not None:
        local = local.new_empty((*local.shape[:2], *whole[1]))
    for index in reversed(resize.by_taps(axes)):
        local = backward_dim(local, 2 + index, resize.taps(index), axes.get(2 + index))
    return wrap_as(local, grad.device_mesh, grad.placements, shape)


rule(*(getattr(aten, name).default for name in _MODES))(_forward)
backward_rule(*(getattr(aten, f"{name}_backward").default for name in _MODES))(_backward)
