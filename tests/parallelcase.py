"""A small model, unsplit and parallelized, for the tests of `parallelize`."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import (
    assert_close,
    assert_replicated,
    full,
    mesh_of,
)


class Net(nn.Module):
    """A small ConvNet with a stride, a depthwise 7x7 across the seam, a shortcut and a transposed
    convolution."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.dw = nn.Conv2d(8, 8, 7, padding=3, groups=8, bias=False)
        self.pw = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x):
        x = F.gelu(self.stem(x))
        x = x + self.pw(F.gelu(self.dw(x))) * self.scale
        return self.up(x)


def make(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind().double()


def data(batch=2, height=6, width=18, channels=3, seed=1):
    return torch.randn(
        batch, channels, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def compare_gradients(plain, sharded, what="gradient"):
    others = dict(sharded.named_parameters())
    assert list(others) == [name for name, _ in plain.named_parameters()]
    for name, p in plain.named_parameters():
        got = others[name].grad
        if p.grad is None:
            assert got is None, f"{what} of {name}: expected None"
            continue
        assert got is not None, f"{what} of {name}: None"
        assert_replicated(got, p.grad, f"{what} of {name}")


def both(world, kind=Net, dim=-1, **options):
    import haloconv

    mesh = mesh_of((world,))
    plain = make(kind)
    return haloconv, mesh, plain, haloconv.parallelize(copy.deepcopy(plain), mesh, dim=dim, **options)


def step(haloconv, plain, sharded, mesh, x, dim=-1):
    """One forward and backward of both; returns both losses."""
    want = (plain(x) ** 2).mean()
    want.backward()
    got = (haloconv.gather(sharded(haloconv.distribute(x, mesh, dim=dim))) ** 2).mean()
    got.backward()
    assert_close(full(got.detach()), want.detach(), "loss")
