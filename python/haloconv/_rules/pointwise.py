"""Elementwise ops that some torch releases have no sharding rule for, and the backwards of activation functions, which
most have none for. None communicates: each rank applies the op to its shards.

To add one: its overload goes into the list.
"""

import torch

from .._dtensor import DTensor, Replicate, Shard, local_of
from .._layout import axes_of, is_sharded, placed_like, settled, wrap_as
from . import _missing
from ._memo import applied
from ._registry import backward_rule, bound, rule, torchs_own

aten = torch.ops.aten


def _overloads(*names):
    """The overloads of these names that this torch has; 'add.Tensor' or 'relu' for 'relu.default'."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(aten, packet, None), overload or "default", None))
    return [op for op in found if op is not None]


def _tensors(values):
    return [value for value in values if isinstance(value, torch.Tensor)]


def _placements(tensors, ndim):
    """Of the result: sharded where the first of the inputs is that is sharded on that mesh dim."""
    dtensors = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    placements = [Replicate()] * dtensors[0].device_mesh.ndim
    for x in dtensors:
        for axis in axes_of(x).values():
            dim = axis.dim + ndim - x.dim()
            if isinstance(placements[axis.mesh_dim], Replicate) and Shard(dim) not in placements:
                placements[axis.mesh_dim] = Shard(dim)
        for mesh_dim, placement in enumerate(x.placements):  # mesh dims of size 1 have no axis
            if placement.is_shard() and x.device_mesh.size(mesh_dim) == 1:
                placements[mesh_dim] = Shard(placement.dim % x.dim() + ndim - x.dim())
    return placements


def _placed(tensor, reference, placements, shape):
    """A tensor argument where the result's placements want it; whole along the dims that it broadcasts."""
    own = []
    for placement in placements:
        dim = placement.dim - (len(shape) - tensor.dim()) if isinstance(placement, Shard) else -1
        sharded = dim >= 0 and tensor.shape[dim] == shape[placement.dim]
        own.append(Shard(dim) if sharded else Replicate())
    return local_of(placed_like(tensor, reference, own))


def _elementwise(op, args, kwargs):
    tensors = _tensors((*args, *kwargs.values()))
    if not any(map(is_sharded, tensors)):
        return torchs_own(op, args, kwargs)
    tensors = [settled(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    reference = next(filter(is_sharded, tensors))
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    in_place = op._schema.arguments[0].alias_info is not None and op._schema.arguments[0].alias_info.is_write
    placements = args[0].placements if in_place else _placements(tensors, len(shape))

    def local(value):
        if not isinstance(value, torch.Tensor):
            return value
        value = settled(value) if isinstance(value, DTensor) else value
        return _placed(value, reference, placements, shape)

    local_args = [local(value) for value in args]
    result = op(*local_args, **{name: local(value) for name, value in kwargs.items()})
    if in_place:
        return applied(op, args, kwargs, local_args, result, args[0])

    def wrapped(tensor):
        if (
            tensor.numel() == 0 and tensor.dim() == 1 and len(shape) != 1
        ):  # a buffer that the device does not use
            return wrap_as(tensor, reference.device_mesh, [Replicate()] * len(placements), tensor.shape)
        return wrap_as(tensor, reference.device_mesh, placements, shape)

    out = wrapped(result) if isinstance(result, torch.Tensor) else tuple(map(wrapped, result))
    return applied(op, args, kwargs, local_args, result, out)


_missing.set_elementwise(_elementwise)
rule(
    *_overloads(
        "_add_relu.Tensor",
        "_conj_physical",
        "_prelu_kernel",
        "bucketize.Tensor",
        "celu",
        "celu_",
        "complex",
        "elu",
        "elu_",
        "floor_divide",
        "floor_divide.Scalar",
        "floor_divide_.Scalar",
        "floor_divide_.Tensor",
        "hardshrink",
        "hardsigmoid",
        "hardsigmoid_",
        "hardswish",
        "hardswish_",
        "hardtanh",
        "hardtanh_",
        "leaky_relu",
        "leaky_relu_",
        "log_sigmoid_forward",
        "masked_fill.Scalar",
        "masked_fill.Tensor",
        "masked_fill_.Scalar",
        "masked_fill_.Tensor",
        "mish",
        "mish_",
        "polar",
        "rsub.Tensor",
        "softplus",
        "softshrink",
        "threshold",
        "threshold_",
    )
)(_elementwise)
backward_rule(
    *_overloads(
        "_prelu_kernel_backward",
        "elu_backward",
        "gelu_backward",
        "hardshrink_backward",
        "hardsigmoid_backward",
        "hardswish_backward",
        "hardtanh_backward",
        "leaky_relu_backward",
        "log_sigmoid_backward",
        "logit_backward",
        "mish_backward",
        "native_dropout_backward",
        "rrelu_with_noise_backward",
        "sigmoid_backward",
        "silu_backward",
        "softplus_backward",
        "softshrink_backward",
        "tanh_backward",
        "threshold_backward",
    )
)(_elementwise)


# ---- gated linear unit: elementwise on two halves ----


def _halves_are_whole(x, dim):
    return is_sharded(x) and dim % x.dim() not in axes_of(x)


@rule(aten.glu.default)
def _glu(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, dim = a["self"], a["dim"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    if x.shape[dim] % 2:
        raise ValueError(f"input has size {x.shape[dim]} in dim {dim}, expected an even one")
    if not _halves_are_whole(x, dim):
        values, gates = x.chunk(2, dim)
        return values * gates.sigmoid()
    shape = list(x.shape)
    shape[dim] //= 2
    return wrap_as(op(local_of(x), dim), x.device_mesh, x.placements, shape)


@backward_rule(aten.glu_backward.default)
def _glu_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    grad, x, dim = a["grad_output"], a["self"], a["dim"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    grad = placed_like(grad, x)
    if not _halves_are_whole(x, dim):
        values, gates = x.chunk(2, dim)
        gates = gates.sigmoid()
        return torch.cat([grad * gates, grad * values * gates * (1 - gates)], dim)
    return wrap_as(op(local_of(grad), local_of(x), dim), x.device_mesh, x.placements, x.shape)


# ---- x[mask] = value ----


def _indexes_shards(x, indices):
    """Whether some index is one of a dim that has shards. A mask takes as many dims as it has."""
    dim, axes = 0, axes_of(x)
    for index in indices:
        taken = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index is not None and any(at in axes for at in range(dim, dim + taken)):
            return True
        dim += taken
    return False


@rule(aten.index_put.default, aten.index_put_.default)
def _put_where(op, args, kwargs):
    """One value where a mask of the first dims says so is elementwise; torch writes it as an indexed write."""
    a = bound(op, args, kwargs)
    x, indices, value = a["self"], a["indices"], a["values"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    mask = indices[0]
    is_mask = len(indices) == 1 and mask is not None and mask.dtype is torch.bool
    if not is_mask or mask.shape != x.shape[: mask.dim()] or value.numel() != 1 or a["accumulate"]:
        if _indexes_shards(x, indices):
            return _missing._without_sharded_form(op, args, kwargs, None)
        return torchs_own(op, args, kwargs)
    mask = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())) if mask.dim() < x.dim() else mask
    value = local_of(settled(value)) if isinstance(value, DTensor) else value
    value = value.reshape(()).to(x.dtype)
    return x.masked_fill_(mask, value) if op is aten.index_put_.default else x.masked_fill(mask, value)
