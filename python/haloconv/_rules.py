"""DTensor rules: ``F.conv2d(dtensor, ...)`` and its kin become right for any spatial sharding.

A rule is a handler (see _dtensor.py) below autograd. It takes the cases that torch gets wrong: convolutions with a
sharded spatial dim, or with sharded batch or channels; losses with a mean over uneven shards; the running statistics
of batch norms. Everything else goes to what torch had.

Backward rules stay installed once they have been switched on: a backward that runs after `disable_rules` would
otherwise fall to torch's wrong one.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist

from . import _convolution, _dtensor
from ._dtensor import DTensor, Replicate
from ._version import __version__

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


def _torchs_own(op, args, kwargs):
    """What torch does with the op when haloconv is not there."""
    original = _originals[op]
    if original is not None:
        return original(op, args, kwargs)
    table = _dtensor.handlers()  # sharding propagation, which is what happens without a handler
    rule = table.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        table[op] = rule


def _convolution_rule(op, args, kwargs):
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if not _is_ours(x, weight, groups):
        return _torchs_own(op, args, kwargs)
    window = _window(weight, stride, padding, dilation, transposed, output_padding, groups)
    mesh = _mesh_of(x, weight)
    x, weight = _convolution.replicated(x, mesh), _convolution.replicated(weight, mesh)
    bias = None if bias is None else _convolution.replicated(bias, mesh)
    return _convolution.forward(x, weight, bias, window)


def _convolution_backward_rule(op, args, kwargs):
    grad_output, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask = args
    if not _is_ours(x, weight, groups):
        return _torchs_own(op, args, kwargs)
    window = _window(weight, stride, padding, dilation, transposed, output_padding, groups)
    mesh = _mesh_of(x, weight)
    tensors = (_convolution.replicated(tensor, mesh) for tensor in (grad_output, x, weight))
    grads = _convolution.backward(*tensors, window, *mask)
    if isinstance(weight, DTensor):
        return grads
    # A plain weight (and with it the bias, which does not come along) counted as replicated: so does its gradient.
    return grads[0], *(grad if grad is None else grad.full_tensor() for grad in grads[1:])


def _composite_rule(transposed):
    """Under inference_mode the composite ops arrive undecomposed."""

    def rule(op, args, kwargs):
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

    return rule


def _as_strided_rule(op, args, kwargs):
    """A tensor that no mesh dim shards is its own storage. A global pool of a channels_last tensor comes here."""
    tensor, size, stride, *offset = args
    if any(placement.is_shard() for placement in tensor.placements) or kwargs:
        return _torchs_own(op, args, kwargs)
    local = _dtensor.local_of(tensor).as_strided(size, stride, *offset)
    return _dtensor.wrap_strided(local, tensor.device_mesh, tensor.placements, size, stride)


def _as_strided_in_place_rule(op, args, kwargs):
    """Only what changes nothing but the stride of dims of size 1."""
    tensor, size, stride, *offset = args
    same = tuple(tensor.shape) == tuple(size) and all(
        length == 1 or before == after for length, before, after in zip(size, tensor.stride(), stride)
    )
    return tensor if same and not any(offset) else _torchs_own(op, args, kwargs)


def _batch_norm_rule(op, args, kwargs):
    """torch may shard channels for a batch norm, and then updates copies of the running statistics that it drops.

    Given the whole input it updates the statistics themselves. That gathers the input, as torch's rule does too where
    it does not shard channels; the output is sharded like the input again.
    """
    x = args[0]
    bound = dict(zip((argument.name for argument in op._schema.arguments), args), **kwargs)
    updates = bound.get("training", True) and bound.get("running_mean") is not None
    if (
        not isinstance(x, DTensor)
        or not updates
        or not any(placement.is_shard() for placement in x.placements)
    ):
        return _torchs_own(op, args, kwargs)
    whole = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    out, *statistics = _torchs_own(op, (whole, *args[1:]), kwargs)
    return out.redistribute(placements=x.placements), *statistics


_BATCH_NORMS = [
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("native_batch_norm", "default"),
        ("_native_batch_norm_legit", "default"),
        ("_native_batch_norm_legit_functional", "default"),
        ("_batch_norm_with_update", "default"),
        ("_batch_norm_with_update_functional", "default"),
        ("cudnn_batch_norm", "default"),
        ("miopen_batch_norm", "default"),
    )
]


_MEAN, _SUM = 1, 2  # at::Reduction


def _mean_loss_rule(op, args, kwargs):
    """torch averages the shards' means, which is wrong for uneven shards. Here the mean is the sum, divided."""
    names = [argument.name for argument in op._schema.arguments]
    bound = dict(zip(names, args), **kwargs)
    if bound.get("reduction", _MEAN) != _MEAN:
        return _torchs_own(op, args, kwargs)
    numel = bound["self"].numel()
    bound["reduction"] = _SUM
    if "grad_output" in names:
        bound["grad_output"] = bound["grad_output"] / numel
        return _torchs_own(op, (), bound)
    return _torchs_own(op, (), bound) / numel


_MEAN_LOSSES = (
    aten.mse_loss,
    aten.smooth_l1_loss,
    aten.huber_loss,
    aten.binary_cross_entropy,
    aten.soft_margin_loss,
)
_MEAN_LOSSES_BACKWARD = (
    aten.mse_loss_backward,
    aten.smooth_l1_loss_backward,
    aten.huber_loss_backward,
    aten.binary_cross_entropy_backward,
    aten.soft_margin_loss_backward,
)

_FORWARD_RULES = {
    aten.convolution.default: _convolution_rule,
    **dict.fromkeys(_BATCH_NORMS, _batch_norm_rule),
    **{packet.default: _mean_loss_rule for packet in (*_MEAN_LOSSES, aten.binary_cross_entropy_with_logits)},
    **{
        overload: _composite_rule(transposed=False)
        for packet in (aten.conv1d, aten.conv2d, aten.conv3d)
        for overload in (packet.default, packet.padding)
    },
    **{
        overload: _composite_rule(transposed=True)
        for overload in (
            aten.conv_transpose1d.default,
            aten.conv_transpose2d.input,
            aten.conv_transpose3d.input,
        )
    },
}
_BACKWARD_RULES = {
    aten.as_strided.default: _as_strided_rule,
    aten.as_strided_.default: _as_strided_in_place_rule,
    aten.convolution_backward.default: _convolution_backward_rule,
    **{packet.default: _mean_loss_rule for packet in _MEAN_LOSSES_BACKWARD},
}

_originals = {}  # what torch had, for the ops whose handler was replaced at least once
_state = {"enabled": False, "graphs": None, "tag": None}


def _install(rules):
    table = _dtensor.handlers()
    for op, rule in rules.items():
        if table.get(op) is not rule:
            _originals[op] = table.get(op)
            table[op] = rule


def _remove(rules):
    table = _dtensor.handlers()
    for op in rules:
        if _originals.get(op) is None:
            table.pop(op, None)
        else:
            table[op] = _originals[op]


def _compiled_graphs():
    """How many graphs dynamo has compiled so far, None where it was never used."""
    if "torch._dynamo" not in sys.modules:
        return None
    return sys.modules["torch._dynamo"].utils.counters["stats"]["unique_graphs"]


def tag_caches():
    """Keeps torch.compile's on-disk caches apart: they key neither the rank nor what the rules are."""
    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")
    tag = f"haloconv {__version__} rules={_state['enabled']} rank={rank}"
    config = torch.compiler.config
    before = config.cache_key_tag or ""
    if _state["tag"] and _state["tag"] in before:
        config.cache_key_tag = before.replace(_state["tag"], tag)
    else:
        config.cache_key_tag = f"{before} {tag}".strip()
    _state["tag"] = tag


def enable_rules():
    """Switches the rules on, for every DTensor program of this process. Idempotent.

    Raises:
        RuntimeError: this torch's DTensor is not one that haloconv knows.
    """
    if _state["enabled"]:
        return
    _dtensor.probe()
    _install(_FORWARD_RULES)
    _install(_BACKWARD_RULES)
    graphs = _compiled_graphs()
    if graphs is not None and graphs != _state["graphs"]:
        torch._dynamo.reset()  # what was compiled without the rules would go on without them
    _state["enabled"] = True
    tag_caches()


def disable_rules():
    """Switches the forward rules off again; torch's own, wrong ones are back. Backward rules stay. Idempotent."""
    if not _state["enabled"]:
        return
    _remove(_FORWARD_RULES)
    _state["enabled"] = False
    _state["graphs"] = _compiled_graphs()
    tag_caches()


def rules_enabled():
    """Whether the rules are on."""
    return _state["enabled"]


@contextlib.contextmanager
def rules():
    """The rules, for the duration of a with block; then whatever was before."""
    before = _state["enabled"]
    enable_rules()
    try:
        yield
    finally:
        if not before:
            disable_rules()
