"""What the C core's ops need from Python: shapes for tracing, and derivatives.

``torch.ops.haloconv.*`` work on local tensors and know nothing of DTensor:

* ``halo_exchange``: shard -> the interval that the rank's windows read; ``halo_reduce`` is its adjoint.
* ``exchange``, ``exchange_reduce``: the same for intervals that are given, one for each rank.
* ``all_reduce``: "sum", "max" or "min" over the ranks of a group, for small tensors.
* ``convolution``, ``convolution_backward``: the sharded convolution. A weight or bias gradient is this rank's part, to
  be summed over the ranks. The backward may be differentiated again, any number of times.

Their arguments are described in csrc/kernels.c. The fake kernels work on symbolic sizes, so that a changed width does
not retrace. The ops communicate, so a compiler may neither drop nor reorder them: they are registered as effectful.
"""

import torch
from torch._library.effects import EffectType
from torch._prims_common import suggest_memory_format

from . import _C, _transport  # noqa: F401  _C defines the ops, _transport those that they call

ops = torch.ops.haloconv

# ---- sizes, symbolic or not ----


def shard_bounds(size, world, rank):
    """torch.chunk's rule, as csrc/shard.c has it."""
    full = (size + world - 1) // world
    return torch.sym_min(rank * full, size), torch.sym_min((rank + 1) * full, size)


def window_out_size(size, kernel, stride, pad_lo, pad_hi, dilation, output_padding, transposed):
    """Global output size, as csrc/plan.c has it."""
    reach = dilation * (kernel - 1)
    if transposed:
        return (size - 1) * stride - pad_lo - pad_hi + reach + output_padding + 1
    return (size + pad_lo + pad_hi - reach - 1) // stride + 1


def _extent_length(size, window, transposed, periodic, rank, world):
    kernel, stride, pad_lo, pad_hi, dilation, output_padding = window
    if transposed:  # the exact interval has no closed form
        plan = _C.plan(
            int(size), world, kernel, stride, pad_lo, pad_hi, dilation, output_padding, True, periodic
        )
        begin, end = plan[1][rank][2]
        return end - begin
    out_size = window_out_size(size, *window, transposed)
    begin, end = shard_bounds(out_size, world, rank)
    length = end - begin
    return torch.sym_min(length, 1) * ((length - 1) * stride + dilation * (kernel - 1) + 1)


def is_channels_last(tensor):
    """Whether a tensor counts as channels_last (or channels_last_3d), as csrc/tensor.c has it."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if form is None:
        return False
    dense = tensor.is_contiguous(memory_format=form)
    if dense != tensor.is_contiguous():
        return dense
    return suggest_memory_format(tensor) != torch.contiguous_format


def _new_like(tensor, sizes, format_of):
    """Uninitialised, with the strides that csrc/tensor.c gives: the memory format is that of `format_of`."""
    if not is_channels_last(format_of):
        return tensor.new_empty(sizes)
    channels, *spatial = sizes[1:]
    return tensor.new_empty([sizes[0], *spatial, channels]).movedim(-1, 1)


# ---- halo_exchange, halo_reduce ----


@torch.library.register_fake("haloconv::halo_exchange")
def _(input, dim, size, window, transposed, periodic, fill, rank, world, group):
    sizes = list(input.shape)
    sizes[dim] = _extent_length(size, window, transposed, periodic, rank, world)
    return _new_like(input, sizes, input)


@torch.library.register_fake("haloconv::halo_reduce")
def _(grad, dim, size, window, transposed, periodic, rank, world, group):
    sizes = list(grad.shape)
    begin, end = shard_bounds(size, world, rank)
    sizes[dim] = end - begin
    return _new_like(grad, sizes, grad)


def _save_all_but(*left_out):
    def setup_context(ctx, inputs, output):
        ctx.rest = tuple(value for index, value in enumerate(inputs) if index not in left_out)

    return setup_context


def _no_gradients(arguments):
    """One entry for each argument that has no gradient. torch takes any empty list for a Tensor[]
    in an op that has one."""
    return [[] if isinstance(value, (list, tuple)) and len(value) == 0 else None for value in arguments]


def _halo_exchange_backward(ctx, grad):
    return ops.halo_reduce(grad, *ctx.rest), *[None] * 9


def _halo_reduce_backward(ctx, grad):
    dim, size, window, transposed, periodic, rank, world, group = ctx.rest
    return ops.halo_exchange(grad, dim, size, window, transposed, periodic, 0.0, rank, world, group), *[
        None
    ] * 8


torch.library.register_autograd(
    "haloconv::halo_exchange", _halo_exchange_backward, setup_context=_save_all_but(0, 6)
)
torch.library.register_autograd(
    "haloconv::halo_reduce", _halo_reduce_backward, setup_context=_save_all_but(0)
)


# ---- exchange, exchange_reduce, all_reduce ----


@torch.library.register_fake("haloconv::exchange")
def _(input, dim, size, extents, periodic, fill, rank, world, group):
    sizes = list(input.shape)
    sizes[dim] = extents[2 * rank + 1] - extents[2 * rank]
    return _new_like(input, sizes, input)


@torch.library.register_fake("haloconv::exchange_reduce")
def _(grad, dim, size, extents, periodic, rank, world, group):
    sizes = list(grad.shape)
    begin, end = shard_bounds(size, world, rank)
    sizes[dim] = end - begin
    return _new_like(grad, sizes, grad)


@torch.library.register_fake("haloconv::all_reduce")
def _(input, reduction, rank, world, group):
    return input.new_empty(input.shape)


def _exchange_backward(ctx, grad):
    return ops.exchange_reduce(grad, *ctx.rest), *[None] * 8


def _exchange_reduce_backward(ctx, grad):
    dim, size, extents, periodic, rank, world, group = ctx.rest
    return ops.exchange(grad, dim, size, extents, periodic, 0.0, rank, world, group), *[None] * 7


def _all_reduce_backward(ctx, grad):
    if ctx.rest[0] != "sum":
        raise RuntimeError(f"reduction is '{ctx.rest[0]}', expected 'sum': no other has a derivative")
    return ops.all_reduce(grad, *ctx.rest), None, None, None, None


torch.library.register_autograd("haloconv::exchange", _exchange_backward, setup_context=_save_all_but(0, 5))
torch.library.register_autograd(
    "haloconv::exchange_reduce", _exchange_reduce_backward, setup_context=_save_all_but(0)
)
torch.library.register_autograd("haloconv::all_reduce", _all_reduce_backward, setup_context=_save_all_but(0))


# ---- convolution ----


def _local_out_sizes(input, weight, stride, padding, dilation, transposed, output_padding, groups, placed):
    """placed: {dim: (global size, rank, world)} of the sharded dims."""
    sizes = [input.shape[0], weight.shape[1] * groups if transposed else weight.shape[0]]
    for index, kernel in enumerate(weight.shape[2:]):
        size, rank, world = placed.get(2 + index, (input.shape[2 + index], 0, 1))
        out_size = window_out_size(
            size,
            kernel,
            stride[index],
            padding[2 * index],
            padding[2 * index + 1],
            dilation[index],
            output_padding[index],
            transposed,
        )
        begin, end = shard_bounds(out_size, world, rank)
        sizes.append(end - begin)
    return sizes


@torch.library.register_fake("haloconv::convolution")
def _(
    input,
    weight,
    bias,
    stride,
    padding,
    dilation,
    transposed,
    output_padding,
    groups,
    periodic,
    dims,
    sizes,
    ranks,
    worlds,
    group_names,
):
    placed = dict(zip(dims, zip(sizes, ranks, worlds)))
    out_sizes = _local_out_sizes(
        input, weight, stride, padding, dilation, transposed, output_padding, groups, placed
    )
    return _new_like(input, out_sizes, input)


@torch.library.register_fake("haloconv::convolution_backward")
def _(grad_output, input, weight, *rest):
    *_, transposed, _, groups, _, _, _, _, _, _, need_input, need_weight, need_bias = rest
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (
        _new_like(input, list(input.shape), input) if need_input else input.new_empty(0),
        _new_like(weight, list(weight.shape), weight) if need_weight else input.new_empty(0),
        input.new_empty(channels if need_bias else 0),
    )


def _convolution_setup(ctx, inputs, output):
    input, weight, bias, *ctx.rest = inputs
    ctx.has_bias = len(bias) > 0
    ctx.save_for_backward(input, weight)


def _convolution_backward(ctx, grad):
    input, weight = ctx.saved_tensors
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    if ctx.has_bias:
        need_bias = need_bias[0]
    grads = ops.convolution_backward(
        grad, input, weight, *ctx.rest, need_input, need_weight, bool(ctx.has_bias and need_bias)
    )
    return (
        grads[0] if need_input else None,
        grads[1] if need_weight else None,
        [grads[2] if need_bias else None] if ctx.has_bias else [],
        *_no_gradients(ctx.rest),
    )


def _convolution_backward_setup(ctx, inputs, output):
    grad_output, input, weight, *rest = inputs
    ctx.rest, ctx.needs = rest[:-3], rest[-3:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_output, input, weight)


def double_backward(convolve, differentiate, grad_output, input, weight, cotangents, needs):
    """Gradients of a convolution's backward, by its bilinearity: all are convolutions and their backwards again.

    Args:
        convolve: (input, weight, bias or None) -> output.
        differentiate: (grad_output, input, weight, need_input, need_weight) -> (grad_input, grad_weight).
        cotangents: of the input, weight and bias gradient, each a tensor or None.
        needs: whether the gradient of grad_output, input, weight is wanted.
    """
    of_input, of_weight, of_bias = cotangents
    for_grad = for_input = for_weight = None
    if needs[0]:
        parts = []
        if of_input is not None:
            parts.append(convolve(of_input, weight, None))
        if of_weight is not None:
            parts.append(convolve(input, of_weight, None))
        if of_bias is not None:
            parts.append(of_bias.view(1, -1, *[1] * (grad_output.dim() - 2)).expand_as(grad_output))
        for_grad = sum(parts[1:], start=parts[0]) if parts else None
    if needs[1] and of_weight is not None:
        for_input = differentiate(grad_output, input, of_weight, True, False)[0]
    if needs[2] and of_input is not None:
        for_weight = differentiate(grad_output, of_input, weight, False, True)[1]
    return for_grad, for_input, for_weight


def _convolution_backward_backward(ctx, *cotangents):
    cotangents = [cotangent if need else None for cotangent, need in zip(cotangents, ctx.needs)]

    def convolve(input, weight, bias):
        return ops.convolution(input, weight, [] if bias is None else [bias], *ctx.rest)

    def differentiate(grad_output, input, weight, need_input, need_weight):
        return ops.convolution_backward(grad_output, input, weight, *ctx.rest, need_input, need_weight, False)

    grads = double_backward(convolve, differentiate, *ctx.saved_tensors, cotangents, ctx.needs_input_grad)
    return *grads, *[None] * (len(ctx.rest) + 3)


torch.library.register_autograd(
    "haloconv::convolution", _convolution_backward, setup_context=_convolution_setup
)
torch.library.register_autograd(
    "haloconv::convolution_backward",
    _convolution_backward_backward,
    setup_context=_convolution_backward_setup,
)

for _name in (
    "halo_exchange",
    "halo_reduce",
    "exchange",
    "exchange_reduce",
    "all_reduce",
    "convolution",
    "convolution_backward",
):
    torch.library._register_effectful_op(f"haloconv::{_name}", EffectType.ORDERED)
