"""Losses with a mean over uneven shards, which torch takes as the mean of the shards' means."""

import torch

from ._registry import backward_rule, rule, torchs_own

aten = torch.ops.aten

_MEAN, _SUM = 1, 2  # at::Reduction


def _mean_loss(op, args, kwargs):
    """The mean is the sum, divided."""
    names = [argument.name for argument in op._schema.arguments]
    bound = dict(zip(names, args), **kwargs)
    if bound.get("reduction", _MEAN) != _MEAN:
        return torchs_own(op, args, kwargs)
    numel = bound["self"].numel()
    bound["reduction"] = _SUM
    if "grad_output" in names:
        bound["grad_output"] = bound["grad_output"] / numel
        return torchs_own(op, (), bound)
    return torchs_own(op, (), bound) / numel


rule(
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
)(_mean_loss)
backward_rule(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
)(_mean_loss)
