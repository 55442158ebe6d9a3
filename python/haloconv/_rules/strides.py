"""as_strided of DTensors, as far as it means the same for a shard: torch does that to channels_last tensors."""

import torch

from .. import _dtensor
from ._registry import backward_rule, torchs_own

aten = torch.ops.aten


@backward_rule(aten.as_strided.default)
def _as_strided_rule(op, args, kwargs):
    """A tensor that no mesh dim shards is its own storage. A global pool of a channels_last tensor comes here."""
    tensor, size, stride, *offset = args
    if any(placement.is_shard() for placement in tensor.placements) or kwargs:
        return torchs_own(op, args, kwargs)
    local = _dtensor.local_of(tensor).as_strided(size, stride, *offset)
    return _dtensor.wrap_strided(local, tensor.device_mesh, tensor.placements, size, stride)


@backward_rule(aten.as_strided_.default)
def _as_strided_in_place_rule(op, args, kwargs):
    """Only what changes nothing but the stride of dims of size 1."""
    tensor, size, stride, *offset = args
    same = tuple(tensor.shape) == tuple(size) and all(
        length == 1 or before == after for length, before, after in zip(size, tensor.stride(), stride)
    )
    return tensor if same and not any(offset) else torchs_own(op, args, kwargs)
