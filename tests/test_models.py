"""Small models, each for one habit of real ones, split against unsplit: output, every gradient, every buffer."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import assert_close, full, mesh_of, run_ranks


class Cameras(nn.Module):
    """(B, N, C, H, W): the cameras are folded into the batch and unfolded again, as in bird's-eye-view perception."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.head = nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x):
        batch, cameras = x.shape[:2]
        features = self.head(self.body(x.flatten(0, 1)))
        return features.view(batch, cameras, *features.shape[1:]).mean(1)


class CausalVideo(nn.Module):
    """3-D convolutions that see the past only: time is padded on one side."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv3d(3, 4, 3), nn.Conv3d(4, 2, (3, 1, 1))
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        x = self.first(F.pad(x, (1, 1, 1, 1, 2, 0)))
        return self.second(F.pad(F.silu(self.norm(x)), (0, 0, 0, 0, 2, 0), mode="replicate"))


class Autoencoder(nn.Module):
    """A VAE's down- and upsampling: asymmetric padding before a strided convolution, nearest, group norm, silu."""

    def __init__(self):
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norm, self.up = nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        x = self.down(F.pad(self.enter(x), (0, 1, 0, 1)))
        return self.up(F.interpolate(F.silu(self.norm(x)), scale_factor=2.0, mode="nearest"))


class ChannelsLast(nn.Module):
    """Permuted to channels-last for layer norm and linear layers, as ConvNeXt is written in torchvision."""

    def __init__(self):
        super().__init__()
        self.stem, self.dw = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        x = self.stem(x)
        y = self.mlp(self.norm(self.dw(x).permute(0, 2, 3, 1))) * self.scale
        return x + y.permute(0, 3, 1, 2)


class Segmenter(nn.Module):
    """Squeeze and excite, pyramid pooling, shortcuts of other sizes, and a frozen norm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SyncBatchNorm(8), nn.Hardswish())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Hardsigmoid())
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(bins), nn.Conv2d(8, 2, 1)) for bins in (1, 2, 3)
        )
        self.frozen, self.head = nn.BatchNorm2d(14).eval(), nn.Conv2d(14, 2, 1)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        y = self.stem(x)
        y = y * self.squeeze(y)
        pyramid = [
            F.interpolate(pool(y), size=y.shape[-2:], mode="bilinear", align_corners=False)
            for pool in self.pools
        ]
        y = self.head(F.relu(self.frozen(torch.cat([y, *pyramid], 1))))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


class Regions(nn.Module):
    """A detector's head: regions are cut out of the features, and a deformable convolution follows offsets."""

    def __init__(self):
        super().__init__()
        self.stem, self.offsets = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 18, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3) * 0.1)

    def forward(self, x):
        from torchvision.ops import deform_conv2d, roi_align

        x = self.stem(x)
        x = deform_conv2d(x, self.offsets(x), self.weight, padding=1)
        boxes = torch.tensor([[0, 1.0, 1.0, 6.0, 4.0], [1, 0.0, 2.0, 9.0, 5.0]], dtype=x.dtype)
        return roi_align(x, boxes, (3, 3), sampling_ratio=2)


MODELS = {  # shape, the sharded dim, options
    Cameras: ((2, 3, 3, 8, 13), 4, {}),
    CausalVideo: ((2, 3, 7, 5, 6), 2, {}),
    Autoencoder: ((2, 3, 8, 14), 3, {}),
    ChannelsLast: ((2, 3, 6, 26), 3, {}),
    Segmenter: ((2, 3, 9, 17), 3, {}),
    Regions: ((2, 3, 6, 11), 3, dict(on_missing="gather")),
}


def compare(world, kind, dim, gathers):
    import haloconv

    shape, own_dim, options = MODELS[kind]
    mesh = mesh_of((world,))
    torch.manual_seed(0)
    plain = kind().double()
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh, **options)
    x = torch.randn(shape, dtype=torch.float64)
    haloconv.reset_comm_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if gathers else "error")
        got = sharded(haloconv.distribute(x, mesh, dim=own_dim if dim is None else dim))
        weights = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (full(got) * weights).sum().backward()
    if (
        plain.__class__ is Segmenter
    ):  # torch's own needs a process group on a GPU: an ordinary norm is the same unsplit
        plain.stem[1] = _as_plain_norm(plain.stem[1])
    want = plain(x)
    (want * weights).sum().backward()
    assert_close(full(got.detach()), want.detach(), "output")
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters()):
        assert_close(full(b.grad), a.grad, f"gradient of {name}")
    for (name, a), b in zip(plain.named_buffers(), sharded.buffers()):
        assert_close(full(b), a, name)
    assert ("gather" in haloconv.comm_stats()["by_op"]) == gathers


def _as_plain_norm(norm):
    plain = nn.BatchNorm2d(norm.num_features).double()
    plain.load_state_dict(norm.state_dict())
    return plain


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("world", [2, 3])
def test_models_equal_unsplit(world, kind):
    """Fails when a habit of real models meets an operation that is wrong, or gathers, or has no backward."""
    run_ranks(world, compare, world, kind, None, kind is Regions)


@pytest.mark.parametrize("kind", [Cameras, Autoencoder, Segmenter], ids=lambda kind: kind.__name__)
def test_models_split_by_rows(kind):
    run_ranks(2, compare, 2, kind, -2, False)
