"""Losses of dense predictions: each rank takes the loss of its pixels, the sums of all ranks are added.

A mean over uneven shards is the sum over all ranks, divided: torch takes the mean of the shards' means. A weighted mean
is divided by the weights of all pixels, wherever they lie. Reduced losses are Replicate. Targets and weights may be
plain tensors, which every rank has whole, or be sharded.
"""

import torch

from .._dtensor import DTensor, Replicate, Shard, local_of
from .._layout import all_reduced, axes_of, is_sharded, placed_like, settled, wrap_as
from ._registry import backward_rule, bound, rule, torchs_own

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction
_HALVES = (torch.float16, torch.bfloat16)


def _beside(tensor, x):
    """The local part of an argument that broadcasts over `x`."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if isinstance(tensor, DTensor):
        tensor = settled(tensor)
    new = x.dim() - tensor.dim()
    placements = []
    for placement in x.placements:
        dim = placement.dim % x.dim() - new if isinstance(placement, Shard) else -1
        broadcast = dim < 0 or tensor.shape[dim] != x.shape[dim + new]
        placements.append(Replicate() if broadcast else Shard(dim))
    return local_of(placed_like(tensor, x, placements))


def _replicated(local, x):
    return wrap_as(local, x.device_mesh, [Replicate()] * x.device_mesh.ndim, local.shape)


def _added(local, x):
    """The sum over all ranks of a local sum, in at least float32."""
    return all_reduced(local, axes_of(x).values())


def _accumulated(local):
    return local.float() if local.dtype in _HALVES else local


# ---- elementwise losses ----


def _sharded_of(*tensors):
    found = next(filter(is_sharded, tensors), None)
    return None if found is None else settled(found)


def _loss(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = _sharded_of(a["self"], a["target"])
    if x is None:
        return torchs_own(op, args, kwargs)
    reduction = a["reduction"]
    if a["self"].shape != a["target"].shape:
        raise ValueError(
            f"target has shape {tuple(a['target'].shape)}, expected that of the input, {tuple(a['self'].shape)}"
        )
    a = {name: _beside(value, x) for name, value in a.items()}
    a["reduction"] = _NONE
    elements = op(**a)
    if reduction == _NONE:
        return wrap_as(elements, x.device_mesh, x.placements, x.shape)
    dtype = elements.dtype
    total = _added(elements.sum(dtype=torch.float32 if dtype in _HALVES else None), x)
    return _replicated((total / x.numel() if reduction == _MEAN else total).to(dtype), x)


def _loss_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = _sharded_of(a["self"], a["target"], a["grad_output"])
    if x is None:
        return torchs_own(op, args, kwargs)
    reduction, numel = a["reduction"], x.numel()
    a = {name: _beside(value, x) for name, value in a.items()}
    if reduction == _MEAN:
        a["grad_output"] = a["grad_output"] / numel
        a["reduction"] = _SUM
    return wrap_as(op(**a), x.device_mesh, x.placements, x.shape)


rule(
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
)(_loss)
backward_rule(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
)(_loss_backward)


# ---- negative log likelihood: (N, C, ...) beside targets of (N, ...) ----


def _without_classes(x):
    """The placements of `x` for a tensor that lacks its dim 1."""
    dims = [p.dim % x.dim() if isinstance(p, Shard) else 1 for p in x.placements]
    return [Replicate() if dim == 1 else Shard(dim - (dim > 1)) for dim in dims]


def _with_classes(target):
    """The other way round."""
    dims = [p.dim % target.dim() if isinstance(p, Shard) else None for p in target.placements]
    return [Replicate() if dim is None else Shard(dim + (dim > 0)) for dim in dims]


class _Likelihood:
    """The local arguments of a negative log likelihood, None in `x` where nothing is sharded, or the classes are."""

    def __init__(self, a):
        logits, target = a["self"], a["target"]
        self.x = _sharded_of(logits)
        if self.x is None and is_sharded(target):
            target = settled(target)
            self.x = placed_like(logits, target, _with_classes(target))
        if self.x is None:
            return
        if 1 in axes_of(self.x) or self.x.dim() == 1:
            self.x = None
            return
        self.target_placements = _without_classes(self.x)
        expected = (self.x.shape[0], *self.x.shape[2:])
        if tuple(target.shape) != expected:
            raise ValueError(
                f"target has shape {tuple(target.shape)}, expected {expected}, one class for each pixel"
            )
        self.target_shape = expected
        self.target = local_of(placed_like(target, self.x, self.target_placements))
        self.weight = self.whole(a["weight"])
        self.logits = local_of(self.x)

    def whole(self, tensor):
        """Of a small argument, all of it."""
        replicated = [Replicate()] * self.x.device_mesh.ndim
        return None if tensor is None else local_of(placed_like(tensor, self.x, replicated))


def _nll(op, args, kwargs):
    a = bound(op, args, kwargs)
    n, reduction, ignored = _Likelihood(a), a["reduction"], a["ignore_index"]
    if n.x is None:
        return torchs_own(op, args, kwargs)
    if reduction == _NONE:
        out, weights = op(n.logits, n.target, n.weight, _NONE, ignored)
        return wrap_as(out, n.x.device_mesh, n.target_placements, n.target_shape), _replicated(weights, n.x)
    dtype, weight = n.logits.dtype, None if n.weight is None else _accumulated(n.weight)
    parts = op(_accumulated(n.logits), n.target, weight, _SUM, ignored)
    total, weights = _added(torch.stack(parts), n.x).unbind()
    out = total / weights if reduction == _MEAN else total
    return _replicated(out.to(dtype), n.x), _replicated(weights, n.x)


def _nll_backward(op, args, kwargs):
    a = bound(op, args, kwargs)
    n, reduction = _Likelihood(a), a["reduction"]
    if n.x is None:
        return torchs_own(op, args, kwargs)
    weights, dtype = n.whole(a["total_weight"]), n.logits.dtype
    if reduction == _NONE:
        grad = local_of(placed_like(a["grad_output"], n.x, n.target_placements))
    else:
        grad = n.whole(a["grad_output"])
    if reduction == _MEAN:
        grad, reduction = (grad / weights).to(dtype), _SUM
    out = op(grad, n.logits, n.target, n.weight, reduction, a["ignore_index"], weights.to(dtype))
    return wrap_as(out, n.x.device_mesh, n.x.placements, n.x.shape)


rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)(_nll)
backward_rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)(_nll_backward)
