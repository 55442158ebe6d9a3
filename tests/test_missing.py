"""Ops that have no sharded form: an error that helps, or a gather of that op alone, and never a wrong value."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import assert_close, full, mesh_of, raises_on_every_rank, run_ranks, shard
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.core


class Attention(nn.Module):
    """A VAE's mid-block: attention over all pixels."""

    def __init__(self, channels=4):
        super().__init__()
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        q, k, v = (part.flatten(2).transpose(1, 2) for part in self.qkv(x).chunk(3, 1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mid = nn.Conv2d(3, 4, 3, padding=1), Attention()
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        return self.head(self.mid(self.stem(x)))


class Other(nn.Module):
    """One op without a sharded form after a convolution."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x):
        return self.function(self.conv(x))


def sample_grid(x):
    theta = torch.tensor([[[0.9, 0.1, 0.0], [-0.1, 0.9, 0.1]]], dtype=x.dtype).expand(x.shape[0], 2, 3)
    return F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)


OTHERS = {
    "grid_sample": sample_grid,
    "cumsum": lambda x: torch.cumsum(x, 3),
    "sort": lambda x: torch.sort(x, 3)[0],
    "fft": lambda x: torch.fft.rfft2(x).abs(),
    "flatten": lambda x: x.flatten(1) * 2,
    "median": lambda x: x.median(3)[0],
}


def gathered(world, kind):
    import haloconv

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    plain = (Net() if kind == "attention" else Other(OTHERS[kind])).double()
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh, on_missing="gather")
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = sharded(haloconv.distribute(x, mesh))
        weights = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (full(got) * weights).sum().backward()
    want = plain(x)
    (want * weights).sum().backward()
    assert_close(full(got.detach()), want.detach(), "output")
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters()):
        assert_close(full(b.grad), a.grad, name)
    return [str(w.message) for w in seen if "no sharded form" in str(w.message)]


@pytest.mark.parametrize("kind", ["attention", *OTHERS])
@pytest.mark.parametrize("world", [2, 3])
def test_gathering_equals_unsplit(world, kind):
    """Fails when what is gathered is put together wrongly, or its gradient goes to the wrong shard."""
    run_ranks(world, gathered, world, kind)


def warns_once():
    from haloconv._rules import _missing

    _missing._warned.clear()
    return gathered(2, "attention"), gathered(2, "attention")


def test_a_gather_is_said_once_with_op_module_and_bytes():
    first, second = run_ranks(2, warns_once)[0]
    assert any("'mid'" in text and "bytes" in text and "aten." in text for text in first)
    assert len(set(first)) == len(first)
    assert not second


def refused(kind):
    import haloconv

    model = Net() if kind == "attention" else Other(OTHERS[kind])
    sharded = haloconv.parallelize(model, mesh_of((2,)))
    sharded(haloconv.distribute(torch.randn(2, 3, 5, 8), mesh_of((2,))))


@pytest.mark.parametrize("kind", ["attention", *OTHERS])
def test_the_default_is_an_error(kind):
    """Fails when an activation is gathered without a word."""
    raises_on_every_rank(2, refused, kind, kinds=("RuntimeError",), match="no sharded form")


def message():
    try:
        refused("attention")
    except RuntimeError as error:
        return str(error)


def test_the_error_says_where_and_what_to_do():
    text = run_ranks(2, message)[0]
    for part in (
        "aten.",
        "'mid'",
        "Attention",
        "(2, 40, 4)",
        "Shard(dim=1)",
        "on_missing='gather'",
        "redistribute",
    ):
        assert part in text, text


def rules_alone():
    """Without parallelize: as strict for images, while a program's own sharded weights are left alone."""
    import haloconv

    mesh = mesh_of((2,))
    with haloconv.rules():
        weight = shard(torch.randn(6, 4), mesh, [Shard(0)])
        assert (weight @ shard(torch.randn(4, 3), mesh, [Shard(0)])).shape == (6, 3)
        x = shard(torch.randn(2, 3, 5, 8), mesh, [Shard(3)])
        with pytest.raises(RuntimeError, match="no sharded form"):
            torch.cumsum(x, 3)
        assert full(torch.cumsum(x, 2)).shape == x.shape
    assert full(torch.cumsum(x, 3)).shape == x.shape  # torch's own way, once the rules are off


def test_rules_without_parallelize():
    run_ranks(2, rules_alone)


def bad_policy():
    import haloconv

    haloconv.parallelize(nn.Conv2d(1, 1, 1), mesh_of((2,)), on_missing="ignore")


def test_on_missing_is_checked():
    raises_on_every_rank(2, bad_policy, match="on_missing")
