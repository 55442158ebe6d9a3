"""All layers but convolutions: torch's own class, run with haloconv's rules on.

The forward is torch's; the rules make each op in it right for sharded inputs. Plain parameters and buffers count as
replicated for the call: a buffer that the forward updates in place is updated, a parameter's gradient is summed over
the ranks.
"""

import contextlib

import torch

from .. import _linear
from .._dtensor import DTensor, Partial, Replicate, is_exactly_shard
from .._rules import layer_rules

_NAMES = [
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "LPPool1d",
    "LPPool2d",
    "LPPool3d",
    "MaxUnpool1d",
    "MaxUnpool2d",
    "MaxUnpool3d",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "SyncBatchNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "GroupNorm",
    "LayerNorm",
    "LocalResponseNorm",
    "Upsample",
    "UpsamplingNearest2d",
    "UpsamplingBilinear2d",
    "ConstantPad1d",
    "ConstantPad2d",
    "ConstantPad3d",
    "ZeroPad1d",
    "ZeroPad2d",
    "ZeroPad3d",
    "ReflectionPad1d",
    "ReflectionPad2d",
    "ReflectionPad3d",
    "ReplicationPad1d",
    "ReplicationPad2d",
    "ReplicationPad3d",
    "CircularPad1d",
    "CircularPad2d",
    "CircularPad3d",
    "PixelShuffle",
    "PixelUnshuffle",
    "ChannelShuffle",
    "Unfold",
    "Fold",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "AlphaDropout",
    "FeatureAlphaDropout",
    "PReLU",
    "RReLU",
    "Softmax2d",
]


@contextlib.contextmanager
def _replicated(module, mesh):
    """The module's plain parameters and buffers as replicated DTensors around the same memory."""
    tables = (module._parameters, module._buffers)
    before = [dict(table) for table in tables]
    placements = [Replicate()] * mesh.ndim
    try:
        for table in tables:
            for name in table:
                tensor = getattr(module, name)  # not table[name]: FSDP2's parameters are presented (_fsdp.py)
                if isinstance(tensor, DTensor):
                    table[name] = tensor
                elif tensor is not None:
                    table[name] = DTensor.from_local(tensor, mesh, placements, run_check=False)
        yield
    finally:
        for table, values in zip(tables, before):
            table.update(values)


class _Sharded:
    """What the classes share; comes before torch's class in the bases."""

    def forward(self, input, *args, **kwargs):
        if not isinstance(input, DTensor):
            return super().forward(input, *args, **kwargs)
        with layer_rules(), _replicated(self, input.device_mesh):
            return self._sharded_forward(input, *args, **kwargs)

    def _sharded_forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` for DTensors, sharded in any dims but the last; each rank multiplies what it holds."""

    def forward(self, input):
        if not isinstance(input, DTensor) or not _is_whole_in_last_dim(input):
            return super().forward(input)
        with _replicated(self, input.device_mesh):
            return _linear.linear(input, self.weight, self.bias)


def _is_whole_in_last_dim(x):
    return all(
        isinstance(placement, (Replicate, Partial))
        or (is_exactly_shard(placement) and placement.dim % x.dim() != x.dim() - 1)
        for placement in x.placements
    )


def _layer(name):
    base = getattr(torch.nn, name)
    body = {"__module__": "haloconv.nn", "__doc__": f"`torch.nn.{name}` for DTensors."}
    if name == "SyncBatchNorm":
        # Its own way is a process group's; the rule takes the statistics over the mesh dims that shard the input.
        body["_sharded_forward"] = torch.nn.modules.batchnorm._BatchNorm.forward
    return type(name, (_Sharded, base), body)


LAYERS = {name: _layer(name) for name in _NAMES if hasattr(torch.nn, name)}
LAYERS["Linear"] = Linear
Linear.__module__ = "haloconv.nn"
