"""Max and average pooling.

Each rank assembles the interval that its outputs' windows read, and pools it without padding in the sharded dims. The
padding is in the interval: -inf for a maximum, 0 for a sum. A window that ceil_mode lets hang over the end is one more
of the same kind.

* Indices of a maximum are global, flat over the spatial dims, as in torch.
* An average is a sum, divided by what torch divides by: that depends on the output's position only, dim by dim.
* Backward: the local gradient of the interval, whose parts then go home to the ranks that own them and are added.
"""

import math

import torch

from .. import _ops
from .._dtensor import local_of
from .._layout import (
    axes_of,
    is_sharded,
    placed_like,
    settled,
    sharded_like,
    windowed,
    windowed_back,
    wrap_as,
)
from ._registry import backward_rule, bound, rule, torchs_own

aten = torch.ops.aten


def _out_size(size, kernel, stride, padding, dilation, ceil_mode):
    """As in torch: with ceil_mode the last window has to start within the input or the left padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    out = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (out - 1) * stride >= size + padding:
        out -= 1
    return out


class _Pool:
    """The numbers of a pooling of `x`, a settled DTensor of (N,) C, spatial dims."""

    def __init__(self, x, n, kernel, stride, padding, dilation=1, ceil_mode=False):
        self.x, self.n, self.first = x, n, x.dim() - n
        self.kernel = self._per_dim("kernel_size", kernel)
        self.stride = self._per_dim("stride", stride) if stride or stride == 0 else self.kernel
        self.padding, self.dilation = self._per_dim("padding", padding), self._per_dim("dilation", dilation)
        self.ceil_mode = ceil_mode
        self.sizes = tuple(x.shape[self.first :])
        self._check()
        self.out_sizes = tuple(
            _out_size(*numbers, ceil_mode)
            for numbers in zip(self.sizes, self.kernel, self.stride, self.padding, self.dilation)
        )
        if any(size < 1 for size in self.out_sizes):
            raise ValueError(
                f"input has spatial sizes {self.sizes}, expected at least the reach of kernel {self.kernel} with "
                f"padding {self.padding} and dilation {self.dilation}: the output would have {self.out_sizes}"
            )
        self.axes = {dim: axis for dim, axis in axes_of(x).items() if dim >= self.first}

    def _per_dim(self, name, value):
        value = (value,) if isinstance(value, int) else tuple(value)
        if len(value) not in (1, self.n):
            raise ValueError(f"{name} is {value}, expected 1 or {self.n} integers")
        return value * self.n if len(value) == 1 else value

    def _check(self):
        if self.x.dim() not in (self.n + 1, self.n + 2):
            raise ValueError(f"input has {self.x.dim()} dims, expected {self.n + 1} or {self.n + 2}")
        for name, least in (("kernel", 1), ("stride", 1), ("dilation", 1), ("padding", 0)):
            values = getattr(self, name)
            if any(value < least for value in values):
                raise ValueError(f"{name} is {values}, expected integers >= {least}")
        if any(2 * padding > kernel for padding, kernel in zip(self.padding, self.kernel)):
            raise ValueError(f"padding is {self.padding}, expected at most half of kernel_size {self.kernel}")

    @property
    def out_shape(self):
        return (*self.x.shape[: self.first], *self.out_sizes)

    def window(self, dim):
        """Of a sharded dim; its padding on the right is what makes the output size that of ceil_mode."""
        i = dim - self.first
        reach = self.dilation[i] * (self.kernel[i] - 1) + 1
        right = (self.out_sizes[i] - 1) * self.stride[i] + reach - self.sizes[i] - self.padding[i]
        return self.kernel[i], self.stride[i], self.padding[i], right, self.dilation[i]

    def read(self, local, fill):
        """What this rank's windows read."""
        for dim, axis in self.axes.items():
            local = windowed(local, axis, self.window(dim), fill)
        return local

    def give_back(self, grad):
        """The adjoint of `read`."""
        for dim, axis in reversed(self.axes.items()):
            grad = windowed_back(grad, axis, self.window(dim))
        return grad

    def own_outputs(self, index):
        """(begin, end) of this rank's outputs in a spatial dim."""
        axis = self.axes.get(self.first + index)
        return axis.bounds(self.out_sizes[index]) if axis else (0, self.out_sizes[index])

    def local_padding(self):
        """Of the local op: none where the dim is sharded."""
        return [0 if self.first + i in self.axes else padding for i, padding in enumerate(self.padding)]

    def extended_shape(self, local):
        """Of `read`'s result."""
        shape = list(local.shape)
        for dim in self.axes:
            kernel, stride, _, _, dilation = self.window(dim)
            begin, end = self.own_outputs(dim - self.first)
            shape[dim] = (
                max(0, (end - begin - 1) * stride + dilation * (kernel - 1) + 1) if end > begin else 0
            )
        return shape

    def out_local_shape(self, local):
        spans = [self.own_outputs(index) for index in range(self.n)]
        return (*local.shape[: self.first], *(end - begin for begin, end in spans))


def _empty_like_format(local, shape):
    form = torch.contiguous_format
    if _ops.is_channels_last(local):
        form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, dtype=local.dtype, device=local.device, memory_format=form)


# ---- max ----


def _to_global(pool, indices, local):
    """Turns flat indices over the interval that was read into flat indices over the whole, in place."""
    sizes, begins = _extended_box(pool, local)
    below = 1
    for i in reversed(range(pool.n)):
        if pool.first + i in pool.axes:
            above = torch.div(indices, sizes[i] * below, rounding_mode="floor")
            if begins[i] < 0:
                # A window of nothing but -inf: its index is its first column, in torch the first that is no padding.
                at = torch.div(indices - above * (sizes[i] * below), below, rounding_mode="floor")
                dilation = pool.dilation[i]
                steps = torch.div(at.neg_().sub_(begins[i] - dilation + 1), dilation, rounding_mode="floor")
                indices.add_(steps.clamp_(min=0), alpha=dilation * below)
            indices.add_(above, alpha=(pool.sizes[i] - sizes[i]) * below).add_(begins[i] * below)
        below *= pool.sizes[i]
    return indices


def _to_extended(pool, indices, local):
    """The inverse of `_to_global`, not in place."""
    sizes, begins = _extended_box(pool, local)
    indices, below = indices.clone(), 1
    for i in reversed(range(pool.n)):
        if pool.first + i in pool.axes:
            above = torch.div(indices, pool.sizes[i] * below, rounding_mode="floor")
            indices.add_(above, alpha=(sizes[i] - pool.sizes[i]) * below).sub_(begins[i] * below)
        below *= sizes[i]
    return indices


_WRITES_ANY_FORMAT = (aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d_backward.default)


def _gradient(op, grad, shape, local, *rest, per_output=None):
    """The gradient of an input of this shape. Of the input itself ATen's backward reads the sizes and the format only:
    so the result stands in for it, where ATen writes into one of any format. `per_output` makes the last argument for
    some of the outputs: then only for a quarter of the batch at a time, since it is as large as an activation."""
    out = _empty_like_format(local, shape)
    if op not in _WRITES_ANY_FORMAT or torch._guards.detect_fake_mode(local) is not None:
        return op(grad, out, *rest, *([per_output(slice(None))] if per_output else []))
    step = max(1, -(-len(out) // 4)) if per_output else max(1, len(out))
    for part in (slice(begin, begin + step) for begin in range(0, len(out), step)):
        arguments = (*rest, *([per_output(part)] if per_output else []))
        op.overloadpacket.grad_input(grad[part], out[part], *arguments, grad_input=out[part])
    return out


def _extended_box(pool, local):
    """Sizes and global begins of the interval that was read."""
    sizes, begins = pool.extended_shape(local)[pool.first :], []
    for i in range(pool.n):
        sharded = pool.first + i in pool.axes
        begins.append(pool.own_outputs(i)[0] * pool.stride[i] - pool.padding[i] if sharded else 0)
    return sizes, begins


def _lowest(dtype):
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


@rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def _max_pool(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["self"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    n = 2 if op is aten.max_pool2d_with_indices.default else 3
    pool = _Pool(x, n, a["kernel_size"], a["stride"], a["padding"], a["dilation"], a["ceil_mode"])
    local = local_of(x)
    extended = pool.read(local, _lowest(x.dtype))
    out_shape = pool.out_local_shape(local)
    if math.prod(out_shape) == 0:
        out = _empty_like_format(local, out_shape)
        indices = torch.empty_like(out, dtype=torch.int64)
    else:
        out, indices = op(
            extended, pool.kernel, pool.stride, pool.local_padding(), pool.dilation, pool.ceil_mode
        )
        indices = _to_global(pool, indices, local)
    wrapped = [wrap_as(t, x.device_mesh, x.placements, pool.out_shape) for t in (out, indices)]
    return tuple(wrapped)


@backward_rule(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def _max_pool_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, indices = a["self"], a["indices"]
    if not any(is_sharded(t) for t in (a["grad_output"], x, indices)):
        return torchs_own(op, args, kwargs)
    x = sharded_like(settled(x), a["grad_output"])
    n = 2 if op is aten.max_pool2d_with_indices_backward.default else 3
    pool = _Pool(x, n, a["kernel_size"], a["stride"], a["padding"], a["dilation"], a["ceil_mode"])
    local = local_of(x)
    grad, indices = (local_of(placed_like(t, x)) for t in (a["grad_output"], indices))
    shape = pool.extended_shape(local)
    if grad.numel() == 0:
        extended = local.new_zeros(shape)
    else:
        numbers = (pool.kernel, pool.stride, pool.local_padding(), pool.dilation, pool.ceil_mode)
        extended = _gradient(
            op,
            grad,
            shape,
            local,
            *numbers,
            per_output=lambda part: _to_extended(pool, indices[part], local),
        )
    return wrap_as(pool.give_back(extended), x.device_mesh, x.placements, x.shape)


# ---- average ----


def _counts(pool, index, count_include_pad, device):
    """What torch divides by in one spatial dim, for each of this rank's outputs; a number where all are alike."""
    begin, end = pool.own_outputs(index)
    size, kernel, padding = pool.sizes[index], pool.kernel[index], pool.padding[index]
    starts = [o * pool.stride[index] - padding for o in range(begin, end)]
    ends = [min(start + kernel, size + padding) for start in starts]
    if not count_include_pad:
        starts, ends = [max(start, 0) for start in starts], [min(stop, size) for stop in ends]
    lengths = [stop - start for start, stop in zip(starts, ends)]
    if len(set(lengths)) <= 1:
        return lengths[0] if lengths else 1
    shape = [-1 if i == index else 1 for i in range(pool.n)]
    return torch.tensor(lengths, device=device).view(shape)


def _divisor(pool, a, device):
    """One number, or a tensor that broadcasts over the outputs."""
    if a["divisor_override"] is not None:
        if a["divisor_override"] == 0:
            raise ValueError("divisor_override is 0, expected another number")
        return a["divisor_override"]
    return math.prod(_counts(pool, index, a["count_include_pad"], device) for index in range(pool.n))


def _average(op, pool, extended, divisor):
    """The local pooling with a divisor that is a number."""
    return op(extended, pool.kernel, pool.stride, pool.local_padding(), pool.ceil_mode, True, divisor)


@rule(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["self"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    n = 2 if op is aten.avg_pool2d.default else 3
    pool = _Pool(x, n, a["kernel_size"], a["stride"], a["padding"], 1, a["ceil_mode"])
    local = local_of(x)
    divisor = _divisor(pool, a, local.device)
    extended = pool.read(local, 0.0)
    out_shape = pool.out_local_shape(local)
    if math.prod(out_shape) == 0:
        out = _empty_like_format(local, out_shape)
    elif isinstance(divisor, int):
        out = _average(op, pool, extended, divisor)
    else:
        out = _average(op, pool, extended, 1).div_(divisor)
    return wrap_as(out, x.device_mesh, x.placements, pool.out_shape)


@backward_rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _avg_pool_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["self"]
    if not any(is_sharded(t) for t in (a["grad_output"], x)):
        return torchs_own(op, args, kwargs)
    x = sharded_like(settled(x), a["grad_output"])
    n = 2 if op is aten.avg_pool2d_backward.default else 3
    pool = _Pool(x, n, a["kernel_size"], a["stride"], a["padding"], 1, a["ceil_mode"])
    local, grad = local_of(x), local_of(placed_like(a["grad_output"], x))
    divisor = _divisor(pool, a, local.device)
    shape = pool.extended_shape(local)
    if grad.numel() == 0:
        extended = local.new_zeros(shape)
    else:
        if not isinstance(divisor, int):
            grad, divisor = grad / divisor, 1
        numbers = (pool.kernel, pool.stride, pool.local_padding(), pool.ceil_mode)
        extended = _gradient(op, grad, shape, local, *numbers, True, divisor)
    return wrap_as(pool.give_back(extended), x.device_mesh, x.placements, x.shape)
