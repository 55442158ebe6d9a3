"""F.unfold (im2col) and F.fold (col2im), which are each other's backward.

Columns are the outputs of a convolution's windows, row after row, in one dim of length L. With a sharded spatial dim L
is sharded, by torch.chunk's rule; a rank's columns need whole rows of the image, so an image that is sharded in its
last dim is sharded anew, by rows, first. Then:

* im2col: fetch the rows that the rank's columns read, im2col of them, cut off what other ranks have of the first and
  the last row of windows.
* col2im, its adjoint: zeros in place of that, col2im onto those rows, and the rows' parts go home and are added. The
  result is sharded in the dim that the image of the latest im2col was.
"""

import torch

from .._dtensor import Shard, local_of
from .._layout import axes_of, exchanged, exchanged_back, is_sharded, resharded, settled, wrap_as
from ._missing import _without_sharded_form
from ._registry import backward_rule, bound, torchs_own

aten = torch.ops.aten

_sides = {}  # (mesh, mesh dim) -> spatial dim, -2 or -1, that it sharded in the image of the latest im2col


def _pair(name, value, least):
    value = tuple(value) * 2 if len(value) == 1 else tuple(value)
    if len(value) != 2 or any(number < least for number in value):
        raise ValueError(f"{name} is {value}, expected two integers >= {least}")
    return value


class _Windows:
    """The numbers of an im2col of images of `height` x `width`."""

    def __init__(self, a, height, width):
        self.height, self.width = height, width
        self.kernel, self.dilation = (
            _pair("kernel_size", a["kernel_size"], 1),
            _pair("dilation", a["dilation"], 1),
        )
        self.padding, self.stride = _pair("padding", a["padding"], 0), _pair("stride", a["stride"], 1)
        self.rows, self.columns = (
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, padding, dilation, kernel, stride in zip(
                (height, width), self.padding, self.dilation, self.kernel, self.stride
            )
        )
        if self.rows < 1 or self.columns < 1:
            raise ValueError(
                f"kernel_size is {self.kernel} with padding {self.padding} and dilation {self.dilation}, expected at "
                f"most the image's size {height, width}"
            )

    @property
    def length(self):
        return self.rows * self.columns

    def numbers(self, padding):
        """The last arguments of the local ops."""
        return self.kernel, self.dilation, padding, self.stride

    def window_rows(self, begin, end):
        """The rows of windows that an interval of columns touches."""
        return begin // self.columns, -(-end // self.columns)

    def extents(self, axis):
        """The image rows that every rank's columns read. axis: the sharded dim of the columns, or one like it."""
        found = []
        for rank in range(axis.world):
            first, last = self.window_rows(*axis.bounds(self.length, rank))
            reach = (last - 1 - first) * self.stride[0] + self.dilation[0] * (self.kernel[0] - 1) + 1
            begin = first * self.stride[0] - self.padding[0]
            found.append((begin, begin + reach) if last > first else (0, 0))
        return found


@backward_rule(aten.im2col.default)
def _im2col(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["self"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    if x.dim() not in (3, 4):
        raise ValueError(f"input has {x.dim()} dims, expected 3 or 4")
    axes, ndim = axes_of(x), x.dim()
    if ndim - 3 in axes or (ndim - 2 in axes and ndim - 1 in axes):
        return _without_sharded_form(op, args, kwargs, None)
    *batch, channels, height, width = x.shape
    windows = _Windows(a, height, width)
    for side in (-2, -1):
        if ndim + side in axes:
            mesh_dim = axes[ndim + side].mesh_dim
            _sides[x.device_mesh, mesh_dim] = side
            if side == -1:
                x = resharded(x, axes[ndim - 1], ndim - 2)
    axis, local = axes_of(x).get(ndim - 2), local_of(x)
    out_channels = channels * windows.kernel[0] * windows.kernel[1]
    out_shape = [*batch, out_channels, windows.length]
    begin, end = axis.bounds(windows.length) if axis else (0, windows.length)
    if axis:
        local = exchanged(local, axis, windows.extents(axis))
    if begin == end or local.numel() == 0:
        local = local.new_empty([*local.shape[: ndim - 3], out_channels, end - begin])
    elif axis:
        local = op(local, *windows.numbers((0, windows.padding[1])))
        first, _ = windows.window_rows(begin, end)
        local = local.narrow(-1, begin - first * windows.columns, end - begin).contiguous()
    else:
        local = op(local, *windows.numbers(windows.padding))
    placements = [_of_columns(p, ndim) for p in x.placements]
    return wrap_as(local, x.device_mesh, placements, out_shape)


def _of_columns(placement, ndim):
    """The columns' placement for an image's: rows become columns, as does what a single rank has in other dims."""
    if not placement.is_shard():
        return placement
    dim = placement.dim % ndim
    return Shard(min(dim, ndim - 2))


@backward_rule(aten.col2im.default)
def _col2im(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["self"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    if x.dim() not in (2, 3):
        raise ValueError(f"input has {x.dim()} dims, expected 2 or 3")
    height, width = _pair("output_size", a["output_size"], 1)
    windows = _Windows(a, height, width)
    *batch, in_channels, length = x.shape
    area = windows.kernel[0] * windows.kernel[1]
    if in_channels % area or length != windows.length:
        raise ValueError(
            f"input has shape {tuple(x.shape)}, expected (..., a multiple of {area}, {windows.length}) for output_size "
            f"{height, width}"
        )
    ndim, axes, local = x.dim(), axes_of(x), local_of(x)
    if ndim - 2 in axes:
        return _without_sharded_form(op, args, kwargs, None)
    axis = axes.get(ndim - 1)
    if axis:
        rows = axis._replace(dim=ndim - 1, size=height)  # the same dim of the image is its height
        extents = windows.extents(axis)
        begin, end = axis.bounds()
        first, last = windows.window_rows(begin, end)
        reach = extents[axis.rank][1] - extents[axis.rank][0]
        size, padding = (reach, width), (0, windows.padding[1])
        around = [begin - first * windows.columns, last * windows.columns - end]
        local = aten.constant_pad_nd.default(local, around if end > begin else [0, 0])
    else:
        size, padding = (height, width), windows.padding
    if local.numel() == 0:
        local = local.new_zeros([*local.shape[: ndim - 2], in_channels // area, *size])
    else:
        local = op(local, size, *windows.numbers(padding))
    if axis:
        local = exchanged_back(local, rows, extents)
    placements = [Shard(p.dim % ndim) if p.is_shard() else p for p in x.placements]
    out = wrap_as(local, x.device_mesh, placements, [*batch, in_channels // area, height, width])
    if axis and _sides.get((x.device_mesh, axis.mesh_dim)) == -1:
        out = resharded(out, axes_of(out)[ndim - 1], ndim)
    return out
