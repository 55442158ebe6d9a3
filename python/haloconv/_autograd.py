"""Convolution of DTensors with gradients: what the layers call.

In eager mode it is one autograd function from DTensors to DTensors, which costs the least host time. Such a function
does not trace under ``torch.compile(fullgraph=True)``, while `to_local`, the op and `from_local` do, so compiling takes
that way. Both compute the same.
"""

import torch

from . import _convolution, _ops
from ._dtensor import DTensor, Replicate, strides_of


class _Convolution(torch.autograd.Function):
    """Weight and bias are cast to what autocast wants in here, and in backward again: what is kept is the weight, which
    is there anyway, and not a copy of it."""

    @staticmethod
    def forward(ctx, x, weight, bias, window, dtype):
        ctx.window, ctx.dtype = window, dtype
        ctx.save_for_backward(x, weight)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        return _convolution.forward(x, cast(weight, dtype), cast(bias, dtype), window)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        differentiate = _ConvolutionBackward.apply if torch.is_grad_enabled() else _convolution.backward
        grads = differentiate(grad_output, x, cast(weight, ctx.dtype), ctx.window, *ctx.needs_input_grad[:3])
        grads = [
            grad if grad is None or grad.dtype == dtype else grad.to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes)
        ]
        return *grads, None, None


class _ConvolutionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad_output, x, weight, window, *needs):
        ctx.window, ctx.needs = window, needs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad_output, x, weight)
        return _convolution.backward(grad_output, x, weight, window, *needs)

    @staticmethod
    def backward(ctx, *cotangents):
        def convolve(x, weight, bias):
            return _Convolution.apply(x, weight, bias, ctx.window, None)

        def differentiate(grad_output, x, weight, need_x, need_weight):
            return _ConvolutionBackward.apply(grad_output, x, weight, ctx.window, need_x, need_weight, False)

        *of_tensors, of_bias = cotangents
        cotangents = *of_tensors, _as_dtensor(of_bias, ctx.saved_tensors[0].device_mesh)
        grads = _ops.double_backward(
            convolve, differentiate, *ctx.saved_tensors, cotangents, ctx.needs_input_grad
        )
        return *grads, None, None, None, None


def _as_dtensor(tensor, mesh):
    """A plain parameter as a replicated DTensor; its gradient comes back plain, summed over the ranks."""
    if tensor is None or isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def autocast_dtype(x):
    """The dtype that autocast wants for convolutions and products of `x`, None outside of it."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast(tensor, dtype):
    """What autocast does to an argument; `dtype` None: nothing."""
    if dtype is None or tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def convolution(x, weight, bias, window):
    """Differentiable sharded convolution of the DTensor `x`; weight and bias plain or DTensors, bias may be None."""
    dtype = autocast_dtype(x)
    x = cast(x, dtype)
    compiling = torch.compiler.is_compiling()
    if compiling or (bias is not None and isinstance(weight, DTensor) != isinstance(bias, DTensor)):
        weight, bias = _as_dtensor(weight, x.device_mesh), _as_dtensor(bias, x.device_mesh)
    if not compiling:
        return _Convolution.apply(x, weight, bias, window, dtype)
    return _traceable_convolution(x, cast(weight, dtype), cast(bias, dtype), window)


def _traceable_convolution(x, weight, bias, window):
    mesh = x.device_mesh
    _convolution.check_window(window, x.shape, weight.shape)
    x = x.redistribute(placements=_convolution.usable(x.placements, mesh, window, x.dim()))
    layout = _convolution.layout_of(mesh, x.placements, weight.placements, window, x.shape)
    weight = weight.redistribute(placements=layout.weight)
    local_bias = []
    if bias is not None:
        local_bias = [
            bias.redistribute(placements=layout.weight).to_local(grad_placements=layout.grad_weight)
        ]
    local = _ops.ops.convolution(
        x.to_local(grad_placements=layout.grad_input),
        weight.to_local(grad_placements=layout.grad_weight),
        local_bias,
        *_convolution.op_arguments(window, layout, x.shape),
    )
    shape = torch.Size(_convolution.global_out_shape(x.shape, weight.shape, window))
    strides = strides_of(shape, _ops.is_channels_last(x))
    return DTensor.from_local(local, mesh, layout.out, run_check=False, shape=shape, stride=strides)
