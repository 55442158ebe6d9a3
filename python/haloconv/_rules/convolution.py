"""Convolutions of DTensors.

Left to torch: nothing sharded, and channels sharded without groups, unless space is sharded too. Everything else torch
gets wrong, or has no answer for.
"""

import torch

from .. import _convolution, _dtensor
from .._dtensor import DTensor
from .._layout import is_sharded, sharded_like
from ._registry import backward_rule, rule, torchs_own

aten = torch.ops.aten


def _as_tuple(value, n):
    """ATen accepts one number for all spatial dims."""
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * n if len(value) == 1 else value


def _same_padding(weight_shape, dilation):
    """padding='same': the odd one out goes to the right, as in torch."""
    padding = []
    for kernel, step in zip(weight_shape[2:], dilation):
        total = step * (kernel - 1)
        padding += [total // 2, total - total // 2]
    return tuple(padding)


def _window(weight, stride, padding, dilation, transposed, output_padding, groups):
    n = weight.dim() - 2
    stride, dilation = _as_tuple(stride, n), _as_tuple(dilation, n)
    if padding == "same":
        if any(step != 1 for step in stride):
            raise ValueError(f"stride is {stride}, expected 1 with padding='same'")
        padding = _same_padding(weight.shape, dilation)
    elif padding == "valid":
        padding = (0,) * (2 * n)
    else:
        padding = _convolution.pairs(_as_tuple(padding, n))
    return _convolution.Window(
        stride, padding, dilation, transposed, _as_tuple(output_padding, n), groups, (False,) * n
    )


def _is_ours(x, weight, groups):
    """Whether the convolution is one that torch's own handler gets wrong, or has no answer for.

    Left to torch: nothing sharded, and channels sharded without groups, unless space is sharded too.
    """
    sharded = {"x": set(), "weight": set()}
    for name, tensor in (("x", x), ("weight", weight)):
        for placement in tensor.placements if isinstance(tensor, DTensor) else ():
            if placement.is_shard():
                if not _dtensor.is_exactly_shard(placement):
                    return True
                sharded[name].add(placement.dim % tensor.dim())
    if any(dim >= 2 for dims in sharded.values() for dim in dims):
        return True
    if groups > 1:
        return bool(sharded["x"] or sharded["weight"])
    return sharded["x"] == {0} and not sharded["weight"]


def _mesh_of(*tensors):
    return next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))


@rule(aten.convolution.default)
def _convolution_rule(op, args, kwargs):
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if not _is_ours(x, weight, groups):
        return torchs_own(op, args, kwargs)
    window = _window(weight, stride, padding, dilation, transposed, output_padding, groups)
    mesh = _mesh_of(x, weight)
    x, weight = _convolution.replicated(x, mesh), _convolution.replicated(weight, mesh)
    bias = None if bias is None else _convolution.replicated(bias, mesh)
    return _convolution.forward(x, weight, bias, window)


@backward_rule(aten.convolution_backward.default)
def _convolution_backward_rule(op, args, kwargs):
    grad_output, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask = args
    x = sharded_like(x, grad_output)
    # torch's own backward does not take a gradient that lies otherwise than its output did.
    if not _is_ours(x, weight, groups) and (is_sharded(x) or is_sharded(weight)):
        return torchs_own(op, args, kwargs)
    window = _window(weight, stride, padding, dilation, transposed, output_padding, groups)
    mesh = _mesh_of(x, weight)
    tensors = (_convolution.replicated(tensor, mesh) for tensor in (grad_output, x, weight))
    grads = _convolution.backward(*tensors, window, *mask)
    if isinstance(weight, DTensor):
        return grads
    # A plain weight (and with it the bias, which does not come along) counted as replicated: so does its gradient.
    return grads[0], *(grad if grad is None else grad.full_tensor() for grad in grads[1:])


def _register_composites(transposed, *ops):
    """Under inference_mode the composite ops arrive undecomposed."""

    @rule(*ops)
    def convolve(op, args, kwargs):
        bound = dict(zip((argument.name for argument in op._schema.arguments), args), **kwargs)
        x, weight, groups = bound["input"], bound["weight"], bound.get("groups", 1)
        n = weight.dim() - 2
        if x.dim() == n + 1:  # without a batch dim
            bound["input"] = x.unsqueeze(0)
            return op(**bound).squeeze(0)
        if not _is_ours(x, weight, groups):
            return op.decompose(*args, **kwargs)
        window = _window(
            weight,
            bound.get("stride", 1),
            bound.get("padding", 0),
            bound.get("dilation", 1),
            transposed,
            bound.get("output_padding", 0),
            groups,
        )
        mesh, bias = _mesh_of(x, weight), bound.get("bias")
        x, weight = _convolution.replicated(x, mesh), _convolution.replicated(weight, mesh)
        bias = None if bias is None else _convolution.replicated(bias, mesh)
        return _convolution.forward(x, weight, bias, window)


_register_composites(
    False,
    *(
        getattr(packet, name)
        for packet in (aten.conv1d, aten.conv2d, aten.conv3d)
        for name in ("default", "padding")
    ),
)
_register_composites(
    True, aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input
)
