"""The product with a weight along the last dim of a DTensor that is sharded in others: what `haloconv.nn.Linear` calls.

torch flattens all dims but the last for it, which a sharded one that is not the first does not survive. Here each rank
multiplies what it holds. As for convolutions (_autograd.py), in eager mode that is one autograd function from DTensors
to DTensors, and while compiling `to_local`, the product and `from_local`; that way is also the one for double backward.
"""

import torch
import torch.nn.functional as F

from ._autograd import autocast_dtype, cast
from ._dtensor import DTensor, Partial, Replicate, local_of, spec_of, strides_of, wrap_spec
from ._layout import moved_to, settled


class _CastLinear(torch.autograd.Function):
    """`F.linear` of plain tensors where autocast casts the weight: what is kept is the weight, not a copy of it."""

    @staticmethod
    def forward(ctx, input, weight, bias, dtype):
        ctx.dtype, ctx.bias_dtype = dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias, dtype)

    @staticmethod
    def backward(ctx, grad):
        grads = _product_backward(grad, *ctx.saved_tensors, ctx.bias_dtype, ctx.dtype, ctx.needs_input_grad)
        return *grads, None


def _product(input, weight, bias, dtype):
    if dtype is None:
        return F.linear(input, weight, bias)
    with torch.autocast(input.device.type, enabled=False):
        return F.linear(input, cast(weight, dtype), cast(bias, dtype))


def _product_backward(grad, input, weight, bias_dtype, dtype, needs):
    """The gradients that are needed of the first three."""
    for_input = for_weight = for_bias = None
    rows = grad.reshape(-1, grad.shape[-1])
    if needs[0]:
        for_input = grad @ cast(weight, dtype)
    if needs[1]:
        for_weight = (rows.t() @ input.reshape(-1, input.shape[-1])).to(weight.dtype)
    if needs[2]:
        for_bias = rows.sum(0).to(bias_dtype)
    return for_input, for_weight, for_bias


def _plain_linear(input, weight, bias, dtype):
    """`F.linear` of plain tensors, of which the input has been cast."""
    if dtype is None or weight.dtype == dtype or torch.compiler.is_compiling():
        return F.linear(input, weight, bias)
    return _CastLinear.apply(input, weight, bias, dtype)


def _of_parameters(x):
    """The placements of the gradients of weight and bias: each rank has the part of what it holds."""
    return tuple(Partial() if placement.is_shard() else placement for placement in x.placements)


class _Linear(torch.autograd.Function):
    """Weight and bias are replicated on the mesh of x."""

    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        ctx.dtype = dtype
        ctx.save_for_backward(x, weight, bias)
        local = _product(local_of(x), local_of(weight), None if bias is None else local_of(bias), dtype)
        shape = (*x.shape[:-1], weight.shape[0])
        return wrap_spec(
            local, spec_of(x.device_mesh, x.placements, shape, strides_of(shape, False), local.dtype)
        )

    @staticmethod
    def backward(ctx, grad):
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            out = _traceable_linear(*tensors, ctx.dtype)
            needed = [tensor for tensor, need in zip(tensors, needs) if need]
            found = iter(torch.autograd.grad(out, needed, grad, create_graph=True))
            return *(next(found) if need else None for need in needs), None
        x, weight, bias = tensors
        grads = _product_backward(
            local_of(moved_to(settled(grad), x.placements)),
            local_of(x),
            local_of(weight),
            None if bias is None else bias.dtype,
            ctx.dtype,
            needs,
        )
        placements = x.placements, *[_of_parameters(x)] * 2
        return *(_wrapped(*one) for one in zip(grads, tensors, placements)), None


def _wrapped(grad, tensor, placements):
    if grad is None:
        return None
    strides = strides_of(tensor.shape, False)
    return wrap_spec(grad, spec_of(tensor.device_mesh, placements, tensor.shape, strides, grad.dtype))


def _traceable_linear(x, weight, bias, dtype):
    mesh = x.device_mesh
    weight, bias = (
        None if tensor is None else tensor.redistribute(placements=[Replicate()] * mesh.ndim)
        for tensor in (weight, bias)
    )
    local = _plain_linear(
        x.to_local(grad_placements=x.placements),
        weight.to_local(grad_placements=_of_parameters(x)),
        None if bias is None else bias.to_local(grad_placements=_of_parameters(x)),
        dtype,
    )
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    strides = strides_of(shape, False)
    return DTensor.from_local(local, mesh, x.placements, run_check=False, shape=shape, stride=strides)


def _is_replicated(tensor, mesh):
    return tensor is None or (
        tensor.device_mesh == mesh
        and all(isinstance(placement, Replicate) for placement in tensor.placements)
    )


def linear(x, weight, bias):
    """`torch.nn.functional.linear` of DTensors, autocast as there. x: not sharded in its last dim; bias may be None."""
    x = settled(x)
    dtype = autocast_dtype(x)
    if dtype is not None and torch.float64 in (x.dtype, weight.dtype):
        dtype = None
    x = cast(x, dtype)
    is_eager = not torch.compiler.is_compiling() and type(local_of(x)) is torch.Tensor
    if is_eager and all(_is_replicated(tensor, x.device_mesh) for tensor in (weight, bias)):
        return _Linear.apply(x, weight, bias, dtype)
    return _traceable_linear(x, weight, bias, dtype)
