"""Whole models, split over ranks, against themselves unsplit: the short form of zoo.py, one entry for each
mechanism, and proof that zoo.py notices what it is there to notice.
"""

import functools
import re

import pytest
import torch
import torch.nn as nn
import zoo

pytestmark = pytest.mark.timeout(zoo.TIMEOUT_S + 60)

CI = {
    "own/unet2d": "group norm, max pooling, transposed convolutions, skips",
    "own/unet3d": "three dims, instance norm with running statistics",
    "own/unet_bilinear": "batch norm, bilinear upsampling with aligned corners, padding to an odd width",
    "own/vae": "padding on one side, nearest-neighbour upsampling, sums over each sample",
    "own/style_transfer": "reflected and replicated borders, instance norm",
    "own/super_resolution": "pixels unshuffled and shuffled, bicubic upsampling, PReLU",
    "own/pyramid_pooling": "adaptive pooling to several sizes, bilinear upsampling to a given size",
    "timm/resnet10t": "average pooling in shortcuts",
    "timm/convnext_atto": "layer norm over channels, linear layers over channels-last images",
    "timm/tf_mobilenetv3_small_075": "padding computed from the width, squeeze and excitation, hard swish",
    "timm/edgenext_xx_small": "attention, for which activations are gathered where that is asked for",
    "torchvision/squeezenet1_0": "max pooling in ceil mode",
    "torchvision/shufflenet_v2_x0_5": "channels shuffled through a fifth dim",
    "torchvision/resnet18_fpn": "outputs in a dict, nearest-neighbour upsampling to a given size",
}


@pytest.mark.parametrize("name, world", [(name, 2 + at % 2) for at, name in enumerate(CI)])
def test_a_step_equals_the_unsplit_one(name, world):
    """Fails when an output, a gradient or a running statistic of a whole model is not the unsplit one's, an op
    in it raises, or activations are gathered."""
    record = zoo.check(world, zoo.ZOO[name])
    assert record.ok, f"{name} on {world} ranks ({CI[name]}):\n" + "\n".join(record.failures)


# ------------------------------------------------------------------------------------------------ the zoo itself


class _Steeper(torch.autograd.Function):
    """The identity, with a gradient that is a little too large."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + 1e-5)


class Faulty(nn.Module):
    """Right when it is unsplit."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        from torch.distributed.tensor import DTensor, Replicate

        fault = self.fault if isinstance(x, DTensor) else None
        self.seen += 0.0 if fault == "buffer" else 1.0
        x = self.layers(x)
        if fault == "output":
            x = x * (1 + 1e-5)
        elif fault == "gradient":
            x = _Steeper.apply(x)
        elif fault == "gather":
            x = x.redistribute(placements=[Replicate()]).redistribute(placements=x.placements)
        elif fault == "error":
            x = torch.linalg.qr(x).R
        return x


@pytest.mark.parametrize(
    "fault, expected",
    [
        (None, None),
        ("output", r"^output 0 is off by 1\.\de-05 of its largest value"),
        ("gradient", r"^gradient of layers.\S+ is off by 1\.\de-05 of its largest value"),
        ("buffer", r"^buffer seen is off by 1\.0e\+00 of its largest value"),
        ("gather", r"% of the activations are gathered: "),
        ("error", r"aten.linalg_qr"),
    ],
)
def test_the_zoo_notices(fault, expected):
    """Fails when a wrong number, a gather or an error in a model would pass unseen."""
    record = zoo.check(2, zoo.Entry("faulty", functools.partial(Faulty, fault), (12, 14)))
    assert record.ok == (expected is None), record
    if expected:
        assert any(re.search(expected, failure) for failure in record.failures), record.failures
    if fault == "error":
        assert record.op.startswith("aten.linalg_qr"), record.op


def test_names_are_unique_and_known():
    """Fails when an entry hides another one, or the short form names one that is gone."""
    assert len(zoo.ZOO) == len(zoo.ENTRIES)
    assert set(CI) <= set(zoo.ZOO)
    assert [entry.name for entry in zoo.select(["resnet18", "timm/tf_*b0"])] == [
        name for name in zoo.ZOO if name.endswith("/resnet18") or name.startswith("timm/tf_eff")
    ]
