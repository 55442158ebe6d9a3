"""Batch, group, layer and RMS norms.

Each rank takes count, mean and sum of squared deviations of what it holds; one small exchange for each sharded dim that
is normalised over brings them together (Chan's formula, in rank order: the same bits on every rank), and the
normalisation itself is local, with the merged statistics. Backward likewise: two sums for each statistic are
all-reduced, the rest is local.

* Statistics and sums are counted in float32 at least.
* Batch and group norms of a DTensor that nothing shards come here too: torch's are wrong where its local tensor is one
  sample in channels_last, of which ATen sees neither that nor the contrary (see _sums).
* Batch norm: batch and space are normalised over, channels that are sharded stay so. Running statistics are updated in
  place, alike on every rank. Evaluation, and the gradients of parameters wherever they are not needed for that of the
  input, communicate nothing: such gradients are Partial.
* Instance norm is a batch norm of (1, N * C, ...), in torch already.
* What a rule saves for its backward are mean and 1 / sqrt(variance + eps), like torch.
"""

import math

import torch

from .._dtensor import DTensor, Partial, Replicate, Shard, local_of
from .._layout import all_reduced, axes_of, exchanged, is_sharded, placed_like, settled, wrap_as
from ._memo import applied
from ._registry import backward_rule, bound, rule, torchs_own

aten = torch.ops.aten


def _counted_in(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _placed(mesh, by_mesh_dim):
    """Placements: those given by mesh dim, Replicate in all others."""
    return [by_mesh_dim.get(mesh_dim, Replicate()) for mesh_dim in range(mesh.ndim)]


def _parameter(name, tensor, x, placements):
    """What this rank needs of a parameter or buffer of `x`'s norm, in the dtype of the statistics; None for None."""
    if tensor is None:
        return None
    counted_in = _counted_in(x.dtype)
    if tensor.dtype not in (x.dtype, counted_in):
        raise TypeError(
            f"{name} has dtype {tensor.dtype}, expected {x.dtype} or {counted_in} like the input's"
        )
    return local_of(placed_like(tensor, x, placements)).to(counted_in)


def _parameter_grad(grad, parameter, x, placements, shape):
    """A parameter's gradient. One that came as a plain tensor counted as replicated: so does its gradient."""
    dtype = x.dtype if parameter is None else parameter.dtype
    wrapped = wrap_as(grad.to(dtype), x.device_mesh, placements, shape)
    return wrapped if parameter is None or isinstance(parameter, DTensor) else wrapped.full_tensor()


def _per_channel(values, local):
    """(C) or (N, C), such that it broadcasts over (N, C, ...)."""
    return values[(..., *[None] * (local.dim() - 2))]


# ---- statistics ----


def _moments(local):
    """Count, mean and sum of squared deviations of each channel (dim 1): a tensor (3, C)."""
    counted_in = _counted_in(local.dtype)
    channels = local.shape[1]
    if local.numel() == 0:
        return local.new_zeros((3, channels), dtype=counted_in)
    count = local.numel() // channels
    # The running statistics are only there to say in which precision to count.
    mean, variance = aten.batch_norm_update_stats(
        local,
        local.new_zeros(channels, dtype=counted_in),
        local.new_zeros(channels, dtype=counted_in),
        0.0,
    )
    return torch.stack([torch.full_like(mean, count), mean, variance * count])


def _chan(parts):
    """The moments (3, ...) of the union of `parts` (number, 3, ...)."""
    counts, means, squares = parts.unbind(1)
    count = counts.sum(0)
    offsets = means - means[:1]  # small against a mean that is not
    offset = (counts * offsets).sum(0) / count.clamp(min=1)
    squares = squares.sum(0) + (counts * (offsets - offset) ** 2).sum(0)
    return torch.stack([count, means[0] + offset, squares])


def _merged(moments, axes):
    """The moments over all ranks of the axes."""
    for axis in axes:
        rows = axis._replace(dim=0, size=axis.world)  # one for each rank
        moments = _chan(exchanged(moments[None], rows, [(0, axis.world)] * axis.world))
    return moments


def _normalized(local, mean, variance, weight, bias, eps):
    """(local - mean) / sqrt(variance + eps) * weight + bias for each channel, in one pass."""
    if local.numel() == 0:
        return torch.empty_like(local)
    return aten.native_batch_norm(local, weight, bias, mean, variance, False, 0.0, eps)[0]


def _sums(grad, local, mean, invstd):
    """Of grad, and of grad times the normalised input, for each channel: a tensor (2, C)."""
    if local.numel() == 0:
        return mean.new_zeros((2, local.shape[1]))
    if grad.stride() != local.stride() and not (grad.is_contiguous() and local.is_contiguous()):
        # ATen misreads a contiguous gradient beside a shard that is channels_last, but does not seem so.
        grad = torch.empty_like(local, dtype=grad.dtype).copy_(grad)
    _, of_product, of_grad = aten.native_batch_norm_backward(
        grad,
        local,
        torch.ones_like(mean),
        mean,
        invstd**-2,
        None,
        None,
        False,
        0.0,
        [False, True, True],
    )
    return torch.stack([of_grad, of_product])


def _input_grad(grad, local, mean, invstd, weight, sums, count):
    """(grad * weight - sums[0] / count - normalised input * sums[1] / count) * invstd; all of them broadcast.

    `sums` are those over `count` values of what _sums says, with grad * weight for grad. One new tensor.
    """
    of_grad, of_product = sums
    result = local - mean
    torch.addcmul(of_grad * invstd / -count, result, of_product * invstd**2 / -count, out=result)
    return result.addcmul_(grad, invstd if weight is None else invstd * weight).to(local.dtype)


# ---- batch norm ----


class _Channels:
    """How the input of a batch norm lies: the axes it is normalised over, and its channels."""

    def __init__(self, x):
        self.x, axes = x, axes_of(x)
        channels = axes.pop(1, None)
        self.axes = list(axes.values())
        self.count = x.numel() // max(x.shape[1], 1)
        self.shape = (x.shape[1],)
        self._sharded = {} if channels is None else {channels.mesh_dim: Shard(0)}

    def placements(self, partial=False):
        """Of a tensor with one value for each channel; partial: this rank's part of a sum over the axes."""
        sums = {axis.mesh_dim: Partial() for axis in self.axes} if partial else {}
        return _placed(self.x.device_mesh, {**sums, **self._sharded})

    def parameter(self, name, tensor):
        return _parameter(name, tensor, self.x, self.placements())

    def wrap(self, values):
        return wrap_as(values, self.x.device_mesh, self.placements(), self.shape)

    def nothing(self, dtype):
        """An output that torch leaves empty."""
        empty = local_of(self.x).new_empty(0, dtype=dtype)
        return wrap_as(empty, self.x.device_mesh, _placed(self.x.device_mesh, {}), (0,))


def _updated(running, new, momentum, channels):
    """The local tensor of running statistics, after an update with `new`."""
    new = channels.wrap(new)
    if isinstance(running, DTensor):
        old, new = local_of(running), local_of(placed_like(new, running))
    else:
        old, new = running, new.full_tensor()
    return (old.to(new.dtype) * (1 - momentum) + new * momentum).to(old.dtype)


def _batch_norm_like(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, running = a["input"], [a.get("running_mean"), a.get("running_var")]
    if not isinstance(x, DTensor):
        return torchs_own(op, args, kwargs)
    updates = op in (aten._batch_norm_with_update.default, aten._batch_norm_with_update_functional.default)
    training = a.get("training", updates)
    if not training and running[0] is None:
        raise ValueError("running_mean is None, expected a tensor where training is False")
    x = settled(x)
    channels, local = _Channels(x), local_of(x)
    eps = a["eps"] if "eps" in a else a["epsilon"]
    weight, bias = (channels.parameter(name, a[name]) for name in ("weight", "bias"))
    new_running = running
    if training:
        _, mean, squares = _merged(_moments(local), channels.axes)
        variance = squares / channels.count
        if running[0] is not None:
            momentum = a["momentum"] if "momentum" in a else a["exponential_average_factor"]
            unbiased = squares / (channels.count - 1) if channels.count > 1 else squares * math.nan
            new_running = [
                _updated(old, new, momentum, channels) for old, new in zip(running, (mean, unbiased))
            ]
        saved = [channels.wrap(mean), channels.wrap(torch.rsqrt(variance + eps))]
    else:
        mean, variance = (
            channels.parameter(f"running_{name}", old) for name, old in zip(("mean", "var"), running)
        )
        saved = [channels.nothing(mean.dtype)] * 2
    out = _normalized(local, mean, variance, weight, bias, eps)
    results = [wrap_as(out, x.device_mesh, x.placements, x.shape), *saved]
    functional = op._schema.returns[-1].name == "running_var_out"
    if len(op._schema.returns) - 2 * functional == 4:
        results.append(channels.nothing(torch.uint8))  # cuDNN's own
    if functional:
        results += [_as_given(old, new) for old, new in zip(running, new_running)]
    elif training and running[0] is not None:
        for old, new in zip(running, new_running):
            (local_of(old) if isinstance(old, DTensor) else old).copy_(new)
    return tuple(results)


def _as_given(old, new):
    """The new running statistics as a tensor of its own, of the kind that the old are."""
    if new is old:
        return old.clone()
    return wrap_as(new, old.device_mesh, old.placements, old.shape) if isinstance(old, DTensor) else new


rule(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
)(_batch_norm_like)


@backward_rule(
    aten.native_batch_norm_backward.default,
    aten.batch_norm_backward.default,
    aten.cudnn_batch_norm_backward.default,
    aten.miopen_batch_norm_backward.default,
)
def _batch_norm_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, parameter = a["input"], a["weight"]
    if not isinstance(x, DTensor):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    channels, local = _Channels(x), local_of(x)
    grad = local_of(placed_like(a["grad_out"] if "grad_out" in a else a["grad_output"], x))
    eps = a["eps"] if "eps" in a else a["epsilon"]
    training = a.get("train", a.get("update", True))
    mask = a.get("output_mask", [True] * 3)
    weight = channels.parameter("weight", parameter)
    if training:
        mean = channels.parameter("save_mean", a["save_mean"])
        name = "save_invstd" if "save_invstd" in a else "save_var"
        invstd = channels.parameter(name, a[name])
    else:
        mean, variance = (channels.parameter(name, a[name]) for name in ("running_mean", "running_var"))
        invstd = torch.rsqrt(variance + eps)
    sums = _sums(grad, local, mean, invstd) if training or mask[1] or mask[2] else None
    partial = not (training and mask[0])
    if not partial:
        sums = all_reduced(sums, channels.axes)
    grads = [None] * 3
    if mask[0]:
        scale = invstd if weight is None else invstd * weight
        if training:
            of_input = _input_grad(
                grad,
                local,
                *(_per_channel(values, local) for values in (mean, invstd)),
                None if weight is None else _per_channel(weight, local),
                [_per_channel(values, local) for values in (sums if weight is None else sums * weight)],
                channels.count,
            )
        else:
            of_input = (grad * _per_channel(scale, local)).to(local.dtype)
        grads[0] = wrap_as(of_input, x.device_mesh, x.placements, x.shape)
    for position, values in ((1, 1), (2, 0)):
        if mask[position]:
            grads[position] = _parameter_grad(
                sums[values], parameter, x, channels.placements(partial), channels.shape
            )
    return tuple(grads)


# ---- group norm ----


class _Groups:
    """How the input of a group norm lies. Groups may be spread over ranks, in space and in channels."""

    def __init__(self, x, groups):
        self.x, self.local, self.groups = x, local_of(x), groups
        self.channels = x.shape[1]
        axes = axes_of(x)
        samples, channels = axes.pop(0, None), axes.get(1)
        self.axes = list(axes.values())  # what statistics are merged over
        self.begin, self.end = channels.bounds() if channels else (0, self.channels)
        self.count = x.numel() // max(x.shape[0] * groups, 1)
        of_channels = {} if channels is None else {channels.mesh_dim: Shard(0)}
        mesh = x.device_mesh
        self.placements = _placed(mesh, of_channels)
        partial = {axis.mesh_dim: Partial() for axis in (*self.axes, *([samples] if samples else []))}
        self.grad_placements = _placed(mesh, {**partial, **of_channels})
        self.statistics_placements = _placed(mesh, {samples.mesh_dim: Shard(0)} if samples else {})

    def parameter(self, name, tensor):
        """(1, this rank's channels)"""
        tensor = _parameter(name, tensor, self.x, self.placements)
        return None if tensor is None else tensor.view(1, -1)

    def wrap(self, values):
        shape = (self.x.shape[0], self.groups)
        return wrap_as(values, self.x.device_mesh, self.statistics_placements, shape)

    def saved(self, name, tensor):
        return _parameter(name, tensor, self.x, self.statistics_placements)

    def by_group(self, values):
        """(..., this rank's channels) -> (..., groups, channels of one), zeros for what other ranks have."""
        if self.end - self.begin < self.channels:
            values = torch.nn.functional.pad(values, (self.begin, self.channels - self.end))
        return values.reshape(*values.shape[:-1], self.groups, self.channels // self.groups)

    def by_channel(self, values):
        """(N, groups) -> (N, this rank's channels)."""
        return values.repeat_interleave(self.channels // self.groups, -1)[..., self.begin : self.end]

    def each_sample(self, function, *tensors):
        """A function of (1, C, ...) that gives (k, C), for each sample of (N, C, ...) tensors: (k, N, C)."""
        samples = range(tensors[0].shape[0])
        if all(tensor.is_contiguous() for tensor in tensors):
            together = function(*(_flat(tensor) for tensor in tensors), slice(None))
            return together.view(together.shape[0], len(samples), self.end - self.begin)
        return torch.stack(
            [function(*(tensor[n : n + 1] for tensor in tensors), slice(n, n + 1)) for n in samples], 1
        )


def _flat(tensor):
    """(N, C, ...) as (1, N * C, rest)."""
    return tensor.reshape(1, tensor.shape[0] * tensor.shape[1], math.prod(tensor.shape[2:]))


@rule(aten.native_group_norm.default)
def _group_norm(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, eps = a["input"], a["eps"]
    if not isinstance(x, DTensor):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    groups = _Groups(x, a["group"])
    local = groups.local
    weight, bias = (groups.parameter(name, a[name]) for name in ("weight", "bias"))
    moments = groups.each_sample(lambda sample, _: _moments(sample), local)
    moments = _chan(groups.by_group(moments).movedim(-1, 0))
    _, mean, squares = _merged(moments, groups.axes)
    variance = squares / groups.count
    rstd = torch.rsqrt(variance + eps)
    if local.is_contiguous():
        per_channel = [groups.by_channel(values) for values in (mean, variance)]
        per_channel += [None if t is None else t.expand(local.shape[0], -1) for t in (weight, bias)]
        per_channel = [None if t is None else t.reshape(-1) for t in per_channel]
        out = _normalized(_flat(local), *per_channel, eps).view(local.shape)
    else:
        out = local - _per_channel(groups.by_channel(mean), local)
        scale = groups.by_channel(rstd) if weight is None else groups.by_channel(rstd) * weight
        out = out.mul_(_per_channel(scale, local))
        out = (out if bias is None else out.add_(_per_channel(bias, local))).to(local.dtype)
    return wrap_as(out, x.device_mesh, x.placements, x.shape), groups.wrap(mean), groups.wrap(rstd)


@backward_rule(aten.native_group_norm_backward.default)
def _group_norm_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, mask = a["input"], a["output_mask"]
    if not isinstance(x, DTensor):
        return torchs_own(op, args, kwargs)
    x = settled(x)
    groups = _Groups(x, a["group"])
    local, grad = groups.local, local_of(placed_like(a["grad_out"], x))
    weight = groups.parameter("weight", a["weight"])
    mean, rstd = (groups.by_channel(groups.saved(name, a[name])) for name in ("mean", "rstd"))
    sums = groups.each_sample(
        lambda dy, sample, n: _sums(dy, sample, mean[n].reshape(-1), rstd[n].reshape(-1)), grad, local
    )
    grads = [None] * 3
    if mask[0]:
        of_group = groups.by_group(sums if weight is None else sums * weight).sum(-1)
        of_group = groups.by_channel(all_reduced(of_group, groups.axes))
        of_input = _input_grad(
            grad,
            local,
            _per_channel(mean, local),
            _per_channel(rstd, local),
            None if weight is None else _per_channel(weight, local),
            [_per_channel(values, local) for values in of_group],
            groups.count,
        )
        grads[0] = wrap_as(of_input, x.device_mesh, x.placements, x.shape)
    for position, values in ((1, 1), (2, 0)):
        if mask[position]:
            grads[position] = _parameter_grad(
                sums[values].sum(0), a["weight"], x, groups.grad_placements, (groups.channels,)
            )
    return tuple(grads)


# ---- layer norm, RMS norm ----


class _Rows:
    """How the input of a layer norm lies: the dims from `first` on are normalised over."""

    def __init__(self, x, normalized_shape):
        self.x, self.local, self.shape = x, local_of(x), tuple(normalized_shape)
        self.first = x.dim() - len(self.shape)
        if not self.shape or tuple(x.shape[max(self.first, 0) :]) != self.shape:
            raise ValueError(
                f"normalized_shape is {self.shape}, expected the last sizes of the input, {tuple(x.shape)}"
            )
        self.count = math.prod(self.shape)
        self.inner = tuple(range(self.first, x.dim()))
        axes = axes_of(x).values()
        rows = {axis.mesh_dim: Shard(axis.dim) for axis in axes if axis.dim < self.first}
        columns = {axis.mesh_dim: Shard(axis.dim - self.first) for axis in axes if axis.dim >= self.first}
        self.axes = [axis for axis in axes if axis.dim >= self.first]
        self.are_whole = not self.axes and self.local.numel() > 0  # ATen's own op will do
        self.statistics_placements = _placed(x.device_mesh, rows)
        self.placements = _placed(x.device_mesh, columns)
        self.grad_placements = _placed(x.device_mesh, {**dict.fromkeys(rows, Partial()), **columns})

    def parameter(self, name, tensor):
        if tensor is None:
            return None
        if tuple(tensor.shape) != self.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected normalized_shape, {self.shape}"
            )
        return local_of(placed_like(tensor, self.x, self.placements))

    def saved(self, tensor):
        return local_of(placed_like(tensor, self.x, self.statistics_placements))

    def wrap(self, values):
        """Of an output like the input."""
        return wrap_as(values, self.x.device_mesh, self.x.placements, self.x.shape)

    def wrap_statistics(self, values):
        shape = (*self.x.shape[: self.first], *[1] * len(self.shape))
        return wrap_as(values, self.x.device_mesh, self.statistics_placements, shape)

    def wrap_grad(self, grad, parameter):
        return _parameter_grad(grad, parameter, self.x, self.grad_placements, self.shape)

    def mean_and_variance(self):
        rows = self.local.shape[: self.first]
        moments = _moments(self.local.reshape(1, math.prod(rows), math.prod(self.local.shape[self.first :])))
        _, mean, squares = _merged(moments, self.axes)
        shape = (*rows, *[1] * len(self.shape))
        return mean.view(shape), (squares / self.count).view(shape)

    def mean_square(self):
        local = self.local.to(_counted_in(self.x.dtype))
        return all_reduced(local.square().sum(self.inner, keepdim=True), self.axes) / self.count

    def scaled(self, rows, weight, bias=None):
        """The output, of normalised rows that may be overwritten."""
        rows = rows if weight is None else rows.mul_(weight)
        rows = rows if bias is None else rows.add_(bias)
        return rows.to(self.x.dtype).contiguous()

    def _over_rows(self, values):
        count = math.prod(values.shape[: self.first])
        return values.reshape(count, *values.shape[self.first :]).sum(0)

    def gradients(self, grad, mean, rstd, weight, mask):
        """Those of input, weight and bias. mean: None for an RMS norm."""
        grad = grad.to(rstd.dtype)
        rows = self.local * rstd if mean is None else (self.local - mean).mul_(rstd)
        of_input = of_weight = of_bias = None
        if mask[1]:
            of_weight = self._over_rows(grad * rows)
        if mask[2]:
            of_bias = self._over_rows(grad)
        if mask[0]:
            grad = grad if weight is None else grad * weight
            sums = [(grad * rows).sum(self.inner, keepdim=True)]
            sums += [] if mean is None else [grad.sum(self.inner, keepdim=True)]
            sums = all_reduced(torch.stack(sums), self.axes) / -self.count
            rows = rows.mul_(sums[0]).add_(grad)
            rows = rows if mean is None else rows.add_(sums[1])
            of_input = rows.mul_(rstd).to(self.x.dtype)
        return of_input, of_weight, of_bias


def _wrapped_grads(rows, grads, parameter):
    of_input, *of_parameters = grads
    return (
        None if of_input is None else rows.wrap(of_input),
        *(None if grad is None else rows.wrap_grad(grad, parameter) for grad in of_parameters),
    )


@rule(aten.native_layer_norm.default)
def _layer_norm(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["input"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    rows = _Rows(settled(x), a["normalized_shape"])
    weight, bias = (rows.parameter(name, a[name]) for name in ("weight", "bias"))
    if rows.are_whole:
        local_args = (rows.local, args[1], weight, bias, a["eps"])
        out, mean, rstd = op(*local_args)
    else:
        mean, variance = rows.mean_and_variance()
        rstd = torch.rsqrt(variance + a["eps"])
        out = rows.scaled((rows.local - mean).mul_(rstd), weight, bias)
    wrapped = rows.wrap(out), rows.wrap_statistics(mean), rows.wrap_statistics(rstd)
    return applied(op, args, kwargs, local_args, (out, mean, rstd), wrapped) if rows.are_whole else wrapped


@backward_rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, mask = a["input"], a["output_mask"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    rows = _Rows(settled(x), a["normalized_shape"])
    grad, mean, rstd = (
        local_of(placed_like(a["grad_out"], rows.x)),
        rows.saved(a["mean"]),
        rows.saved(a["rstd"]),
    )
    weight, bias = (rows.parameter(name, a[name]) for name in ("weight", "bias"))
    if rows.are_whole:
        local_args = (grad, rows.local, args[2], mean, rstd, weight, bias, mask)
        grads = op(*local_args)
    else:
        grads = rows.gradients(grad, mean, rstd, weight, mask)
    wrapped = _wrapped_grads(rows, grads, a["weight"])
    return applied(op, args, kwargs, local_args, grads, wrapped) if rows.are_whole else wrapped


@rule(aten._fused_rms_norm.default)
def _rms_norm(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["input"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    rows = _Rows(settled(x), a["normalized_shape"])
    weight = rows.parameter("weight", a["weight"])
    if rows.are_whole:
        local_args = (rows.local, args[1], weight, a["eps"])
        out, rstd = op(*local_args)
    else:
        eps = torch.finfo(_counted_in(x.dtype)).eps if a["eps"] is None else a["eps"]
        rstd = torch.rsqrt(rows.mean_square() + eps)
        out = rows.scaled(rows.local * rstd, weight)
    wrapped = rows.wrap(out), rows.wrap_statistics(rstd)
    return applied(op, args, kwargs, local_args, (out, rstd), wrapped) if rows.are_whole else wrapped


@backward_rule(aten._fused_rms_norm_backward.default)
def _rms_norm_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, mask = a["input"], a["output_mask"]
    if not is_sharded(x):
        return torchs_own(op, args, kwargs)
    rows = _Rows(settled(x), a["normalized_shape"])
    grad, rstd = local_of(placed_like(a["grad_out"], rows.x)), rows.saved(a["rstd"])
    weight = rows.parameter("weight", a["weight"])
    if rows.are_whole:
        local_args = (grad, rows.local, args[2], rstd, weight, mask)
        grads = op(*local_args)
    else:
        grads = rows.gradients(grad, None, rstd, weight, [*mask, False])[:2]
    wrapped = _wrapped_grads(rows, grads, a["weight"])
    return applied(op, args, kwargs, local_args, grads, wrapped) if rows.are_whole else wrapped
