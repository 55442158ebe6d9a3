"""The sharded convolution on DTensors, below autograd: shared by the rules and by the layers.

Each mesh dim plays one role in a convolution, read off the placements of input and weight:

    role       input      weight     output     grad of input   grad of weight, bias
    spatial    Shard(2+)  Replicate  the same   Shard(2+)       Partial
    batch      Shard(0)   Replicate  Shard(0)   Shard(0)        Partial
    whole      Replicate  Replicate  Replicate  Replicate       Replicate
    grouped    Shard(1)   Shard(0)   Shard(1)   Shard(1)        Shard(0)       groups divide evenly
    channels   Replicate  Shard(0)   Shard(1)   Partial         Shard(0)       groups == 1

Weights that lie otherwise are redistributed (they are small), a Partial input is reduced, an input with sharded
channels of a dense convolution is sharded in space instead. An activation is never gathered: an input that would need
it is refused by name.
"""

import typing

import torch

from . import _C, _ops, _transport
from ._check import on_rank
from ._dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    is_exactly_shard,
    local_of,
    spec_of,
    strides_of,
    wrap,
    wrap_spec,
)
from ._layout import moved_to
from ._mesh import check_mesh, group_name


class Window(typing.NamedTuple):
    """A convolution's numbers, one per spatial dim; padding is lo, hi of each dim in turn."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    periodic: tuple[bool, ...]


def pairs(padding):
    """Symmetric padding, one number a dim, as lo and hi of each dim in turn."""
    return tuple(side for value in padding for side in (value, value))


class Layout(typing.NamedTuple):
    """How a convolution lies on a mesh."""

    out: tuple  # placements
    weight: tuple  # and of the bias
    grad_input: tuple
    grad_weight: tuple
    groups: int  # of the local convolution
    # The sharded spatial dims: dim, rank, world, group name of each.
    dims: tuple[int, ...]
    ranks: tuple[int, ...]
    worlds: tuple[int, ...]
    group_names: tuple[str, ...]


# ---- checks ----


def check_window(window, x_shape, weight_shape):
    """Refuses numbers that do not fit, with a sentence that names them. Sizes may be symbolic."""
    n = len(weight_shape) - 2
    names = {"stride": 1, "dilation": 1, "output_padding": 0}
    for name, least in names.items():
        values = getattr(window, name)
        if len(values) != n or any(value < least for value in values):
            raise ValueError(f"{name} is {values}, expected {n} integers >= {least}{on_rank()}")
    if len(window.padding) != 2 * n:
        raise ValueError(f"padding is {window.padding}, expected {n} pairs{on_rank()}")
    if any(padding < 0 for padding in window.padding):
        raise ValueError(f"padding is {window.padding}, expected no negative padding{on_rank()}")
    if window.transposed and any(window.periodic):
        raise ValueError(
            f"padding_mode is 'circular', expected 'zeros' for a transposed convolution{on_rank()}"
        )
    channels = weight_shape[0] if window.transposed else weight_shape[1] * window.groups
    if window.groups < 1 or weight_shape[0] % window.groups != 0:
        raise ValueError(
            f"groups is {window.groups}, expected a divisor of weight's first size {weight_shape[0]}{on_rank()}"
        )
    if len(x_shape) != n + 2 or x_shape[1] != channels:
        raise ValueError(
            f"input has shape {tuple(x_shape)}, expected {n + 2} dims with {channels} channels for a weight of shape "
            f"{tuple(weight_shape)} and groups={window.groups}{on_rank()}"
        )
    for index in range(n):
        kernel, dilation = weight_shape[2 + index], window.dilation[index]
        if window.transposed:
            if window.output_padding[index] >= max(window.stride[index], dilation):
                raise ValueError(
                    f"output_padding is {window.output_padding}, expected less than stride {window.stride} or "
                    f"dilation {window.dilation}{on_rank()}"
                )
            continue
        sides = window.padding[2 * index : 2 * index + 2]
        if x_shape[2 + index] + sum(sides) < dilation * (kernel - 1) + 1:
            raise ValueError(
                f"input has size {x_shape[2 + index]} in dim {2 + index}, expected at least "
                f"{dilation * (kernel - 1) + 1} with its padding {sides}: the reach of kernel {kernel} "
                f"with dilation {dilation}{on_rank()}"
            )


def check_tensors(x, weight, bias, out_channels):
    """dtypes, devices and the bias's shape."""
    if not x.dtype.is_floating_point:
        raise TypeError(f"input has dtype {x.dtype}, expected a floating one{on_rank()}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}, expected input's {x.dtype}{on_rank()}")
        if tensor.device.type != x.device.type:
            raise ValueError(f"{name} is on {tensor.device}, expected input's {x.device}{on_rank()}")
        if tensor.device_mesh != x.device_mesh:
            raise ValueError(
                f"{name} is on {tensor.device_mesh}, expected input's {x.device_mesh}{on_rank()}"
            )
    if bias is not None and tuple(bias.shape) != (out_channels,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({out_channels},){on_rank()}")


# ---- roles ----


def _role(mesh_dim, mesh, x_placement, weight_placement, window, x_shape):
    if not (isinstance(x_placement, Replicate) or is_exactly_shard(x_placement)):
        raise ValueError(
            f"input has placement {x_placement} on mesh dim {mesh_dim}, expected Shard or Replicate: redistribute it "
            f"first{on_rank()}"
        )
    if isinstance(x_placement, Replicate):
        if window.groups == 1 and not window.transposed and weight_placement == Shard(0):
            return "channels"
        return "whole"
    dim = x_placement.dim % len(x_shape)
    if dim >= 2:
        return "spatial"
    if dim == 0:
        return "batch"
    if _divides(mesh, mesh_dim, window):
        return "grouped"
    raise ValueError(
        f"input is {x_placement} on mesh dim {mesh_dim} of size {mesh.size(mesh_dim)}, with groups={window.groups}: "
        "channels can stay sharded only where the groups divide evenly; redistribute the input to Replicate or to "
        f"another dim first{on_rank()}"
    )


_BY_ROLE = {
    # role: placements of weight (and bias), of their gradients
    "spatial": (Replicate(), Partial()),
    "batch": (Replicate(), Partial()),
    "whole": (Replicate(), Replicate()),
    "grouped": (Shard(0), Shard(0)),
    "channels": (Shard(0), Shard(0)),
}


def layout_of(mesh, x_placements, weight_placements, window, x_shape):
    """The `Layout` for an input and a weight that lie like this; ValueError where there is none."""
    roles = tuple(
        _role(mesh_dim, mesh, x_placement, weight_placement, window, x_shape)
        for mesh_dim, (x_placement, weight_placement) in enumerate(zip(x_placements, weight_placements))
    )
    sharded = {}
    out, grad_input, groups = [], [], window.groups
    for mesh_dim, (role, placement) in enumerate(zip(roles, x_placements)):
        if role in ("spatial", "batch", "grouped"):
            dim = placement.dim % len(x_shape)
            if dim in sharded:
                raise ValueError(
                    f"input is sharded in dim {dim} by mesh dims {sharded[dim]} and {mesh_dim}, expected one mesh dim "
                    f"for each dim: redistribute it first{on_rank()}"
                )
            sharded[dim] = mesh_dim
            out.append(Shard(dim))
            grad_input.append(Shard(dim))
        else:
            out.append(Shard(1) if role == "channels" else Replicate())
            grad_input.append(Partial() if role == "channels" else Replicate())
        if role == "grouped":
            groups //= mesh.size(mesh_dim)
    spatial = sorted((dim, mesh_dim) for dim, mesh_dim in sharded.items() if dim >= 2)
    coordinate = mesh.get_coordinate()
    return Layout(
        out=tuple(out),
        weight=tuple(_BY_ROLE[role][0] for role in roles),
        grad_input=tuple(grad_input),
        grad_weight=tuple(_BY_ROLE[role][1] for role in roles),
        groups=groups,
        dims=tuple(dim for dim, _ in spatial),
        ranks=tuple(coordinate[mesh_dim] for _, mesh_dim in spatial),
        worlds=tuple(mesh.size(mesh_dim) for _, mesh_dim in spatial),
        group_names=tuple(group_name(mesh, mesh_dim) for _, mesh_dim in spatial),
    )


def _numbers(window, weight_shape, index):
    """One spatial dim's kernel, stride, padding (lo, hi), dilation, output_padding."""
    return (
        weight_shape[2 + index],
        window.stride[index],
        *window.padding[2 * index : 2 * index + 2],
        window.dilation[index],
        window.output_padding[index],
    )


def _out_channels(weight_shape, window):
    return weight_shape[1] * window.groups if window.transposed else weight_shape[0]


def global_out_shape(x_shape, weight_shape, window):
    """Global output shape."""
    shape = [x_shape[0], _out_channels(weight_shape, window)]
    for index in range(len(weight_shape) - 2):
        numbers = _numbers(window, weight_shape, index)
        shape.append(_ops.window_out_size(x_shape[2 + index], *numbers, window.transposed))
    return shape


def op_arguments(window, layout, x_shape):
    """The arguments that convolution and convolution_backward share."""
    return (
        list(window.stride),
        list(window.padding),
        list(window.dilation),
        window.transposed,
        list(window.output_padding),
        layout.groups,
        [int(periodic) for periodic in window.periodic],
        list(layout.dims),
        [x_shape[dim] for dim in layout.dims],
        list(layout.ranks),
        list(layout.worlds),
        ",".join(layout.group_names),
    )


# ---- on DTensors, below autograd ----


def usable(placements, mesh, window, ndim):
    """Placements of the input that a convolution can work on, as near to the given ones as possible.

    A Partial is reduced. Channels that cannot stay sharded, since the groups do not divide evenly, are exchanged for
    the last spatial dim that is whole: an all-to-all, in which no rank gets more than its part. (torch's own rules
    for pooling and norms shard channels where space was sharded.)
    """
    result = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    for mesh_dim, placement in enumerate(result):
        if is_exactly_shard(placement) and placement.dim % ndim == 1 and not _divides(mesh, mesh_dim, window):
            taken = {other.dim % ndim for other in result if is_exactly_shard(other)}
            free = [dim for dim in range(ndim - 1, 1, -1) if dim not in taken]
            if free:
                result[mesh_dim] = Shard(free[0])
    return result


def _divides(mesh, mesh_dim, window):
    return window.groups > 1 and window.groups % mesh.size(mesh_dim) == 0


def _waiting_groups(x, weight, window):
    """Names of the groups whose ranks may wait for this one, if it fails in a convolution of these arguments."""
    names = []
    if torch._guards.detect_fake_mode(local_of(x)) is not None:  # tracing: nothing is sent
        return names
    for mesh_dim, placement in enumerate(x.placements):
        world = x.device_mesh.size(mesh_dim)
        index = placement.dim % x.dim() - 2 if is_exactly_shard(placement) else -1
        if world > 1 and index >= 0 and not _sends_nothing(x.shape, weight.shape, window, index, world):
            names.append(group_name(x.device_mesh, mesh_dim))
    return names


def _sends_nothing(x_shape, weight_shape, window, index, world):
    try:
        numbers = _numbers(window, weight_shape, index)
        plan = _C.plan(x_shape[2 + index], world, *numbers, window.transposed, window.periodic[index])
    except (ValueError, IndexError):  # the very arguments that are wrong: on another rank they may be right
        return False
    return not any(rank[5] for rank in plan[1])


class _Call(typing.NamedTuple):
    """All that a convolution of tensors of given specs needs beside the tensors: worked out once."""

    mesh: object
    x: tuple  # placements that x is redistributed to
    layout: Layout
    arguments: tuple
    out_spec: object
    x_spec: object  # of the input's gradient
    weight_spec: object  # of the weight's gradient
    bias_spec: object  # of the bias's gradient


# The ops' own autograd formulas are Python, and take as long as the op where nobody asks for a gradient.
_below_autograd = torch._C._AutoDispatchBelowAutograd

_calls, _calls_by_spec = {}, {}
_MOST_CALLS = 4096


def _checked_call(x, weight, bias, window):
    """Checks everything."""
    mesh = x.device_mesh
    with _transport.reporting(lambda: _waiting_groups(x, weight, window)):
        if torch._guards.detect_fake_mode(local_of(x)) is None:
            check_mesh(mesh)
        check_window(window, x.shape, weight.shape)
        check_tensors(x, weight, bias, _out_channels(weight.shape, window))
        placements = usable(x.placements, mesh, window, x.dim())
        layout = layout_of(mesh, placements, weight.placements, window, x.shape)
        for placement in weight.placements:
            if isinstance(placement, Shard) and placement.dim >= 2:
                raise ValueError(
                    f"weight has placements {weight.placements}, expected none that shards a kernel dim (is this a "
                    f"double backward through the rules? use haloconv.nn's layers for that){on_rank()}"
                )
    shape = global_out_shape(x.shape, weight.shape, window)
    strides = strides_of(shape, _ops.is_channels_last(x))
    return _Call(
        mesh,
        tuple(placements),
        layout,
        op_arguments(window, layout, x.shape),
        spec_of(mesh, layout.out, shape, strides, x.dtype),
        spec_of(mesh, layout.grad_input, x.shape, x.stride(), x.dtype),
        spec_of(mesh, layout.grad_weight, weight.shape, weight.stride(), x.dtype),
        spec_of(mesh, layout.grad_weight, shape[1:2], (1,), x.dtype),
    )


def _key_of(tensor):
    """What a call depends on of one tensor, a DTensor or a plain one."""
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        spec = tensor._spec
        return id(spec.mesh), spec.placements, spec.tensor_meta, local_of(tensor).device
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _short_key_of(tensor):
    """The same in less time, where a DTensor has a spec that was seen before: most specs are kept ones."""
    return id(tensor._spec) if type(tensor) is DTensor else _key_of(tensor)


def _keep(cache, key, call, tensors):
    if len(cache) >= _MOST_CALLS:
        cache.clear()
    # While they are held, no other spec or mesh has their ids.
    cache[key] = call, [tensor._spec for tensor in tensors if isinstance(tensor, DTensor)]
    return call


def _call_of(x, weight, bias, window):
    """The `_Call` for these arguments, from the cache where such were there before."""
    tensors = (x, weight, bias)
    is_traced = type(local_of(x)) is not torch.Tensor  # sizes may be symbols
    if not is_traced:
        short = (_short_key_of(x), _short_key_of(weight), _short_key_of(bias), window)
        found = _calls_by_spec.get(short)
        if found is not None:
            return found[0]
        key = (*map(_key_of, tensors), window)
        found = _calls.get(key)
        if found is not None:
            return _keep(_calls_by_spec, short, found[0], tensors)
    mesh = x.device_mesh
    call = _checked_call(
        x, replicated(weight, mesh), None if bias is None else replicated(bias, mesh), window
    )
    return call if is_traced else _keep(_calls, key, call, tensors)


def _local_parameter(tensor, call):
    """A weight or bias, a DTensor or a plain one, as the layout wants it."""
    if not isinstance(tensor, DTensor):
        if all(placement.is_replicate() for placement in call.layout.weight):
            return tensor
        tensor = replicated(tensor, call.mesh)
    return local_of(moved_to(tensor, call.layout.weight))


def _gradient(local, spec, parameter):
    """The gradient of a weight or bias: a DTensor if that is one, else plain and summed over the ranks."""
    if isinstance(parameter, DTensor):
        return wrap_spec(local, spec)
    if spec.mesh.size() == 1:
        return local
    return local_of(wrap_spec(local, spec).redistribute(placements=[Replicate()] * spec.mesh.ndim))


def forward(x, weight, bias, window):
    """The output DTensor. x is a DTensor; weight and bias are DTensors on its mesh or plain; bias may be None."""
    call = _call_of(x, weight, bias, window)
    arguments = (
        local_of(moved_to(x, call.x)),
        _local_parameter(weight, call),
        [] if bias is None else [_local_parameter(bias, call)],
        *call.arguments,
    )
    with _below_autograd():
        local = _ops.ops.convolution.default(*arguments)
    return wrap_spec(local, call.out_spec)


def backward(grad_output, x, weight, window, need_input, need_weight, need_bias):
    """The gradients of input, weight and bias, None where not needed; the last two are of the weight's kind."""
    call = _call_of(x, weight, None, window)
    arguments = (
        local_of(moved_to(grad_output, call.layout.out)),
        local_of(moved_to(x, call.x)),
        _local_parameter(weight, call),
        *call.arguments,
        need_input,
        need_weight,
        need_bias,
    )
    with _below_autograd():
        local = _ops.ops.convolution_backward.default(*arguments)
    return (
        wrap_spec(local[0], call.x_spec) if need_input else None,
        _gradient(local[1], call.weight_spec, weight) if need_weight else None,
        _gradient(local[2], call.bias_spec, weight) if need_bias else None,
    )


def replicated(tensor, mesh):
    """A plain tensor as a replicated DTensor, below autograd; DTensors as they are."""
    if isinstance(tensor, DTensor):
        return tensor
    return wrap(tensor.detach(), mesh, [Replicate()] * mesh.ndim, tensor.shape)
