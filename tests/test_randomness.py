"""Dropout and its kin: which ranks draw the same numbers, and which don't."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import assert_close, full, mesh_of, run_ranks, shard
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.core


def ones(mesh, dim=3, shape=(4, 6, 8, 30)):
    return shard(torch.ones(shape), mesh, [Shard(dim)])


def elementwise(world):
    import haloconv

    mesh = mesh_of((world,))
    rank = mesh.get_coordinate()[0]
    with haloconv.rules():
        torch.manual_seed(0)
        first, second = (F.dropout(ones(mesh), 0.25) for _ in range(2))
        torch.manual_seed(0)
        again = F.dropout(ones(mesh), 0.25)
        torch.manual_seed(rank)  # and ranks that are seeded differently: still no pattern, no error
        F.dropout(ones(mesh), 0.25)
    values = full(first)
    assert set(values.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    # 5,760 draws: the share of zeros is within 5 standard deviations of 1/4.
    assert abs((values == 0).double().mean().item() - 0.25) < 0.03
    strips = values.chunk(world, 3)
    assert not torch.equal(strips[0], strips[1])
    assert not torch.equal(values, full(second))
    assert torch.equal(values, full(again))


@pytest.mark.parametrize("world", [2, 3])
def test_dropout_masks_differ_between_shards_and_repeat_with_the_seed(world):
    """Fails when all shards have one mask (the same seed everywhere), or when a seed does not reproduce a run."""
    run_ranks(world, elementwise, world)


def per_sample(world, seeds):
    import haloconv

    mesh = mesh_of((world,))
    torch.manual_seed(seeds * mesh.get_coordinate()[0])
    with haloconv.rules():
        for function in (F.dropout2d, F.feature_alpha_dropout):
            values = full(function(ones(mesh), 0.5, True))
            assert torch.equal(values, values[:, :, :1, :1].expand_as(values))
            assert len(values.unique()) == 2
        path = ones(mesh).new_empty((4, 1, 1, 1)).bernoulli_(0.5)  # as in timm's DropPath
        values = full(ones(mesh) * path)
        assert torch.equal(values, values[:, :1, :1, :1].expand_as(values))


@pytest.mark.parametrize("seeds", [0, 1])
@pytest.mark.parametrize("world", [2, 3])
def test_masks_of_whole_samples_agree_on_all_ranks(world, seeds):
    """Fails when ranks, seeded alike or differently, drop different samples or channels."""
    run_ranks(world, per_sample, world, seeds)


class Stochastic(nn.Module):
    """Plain random tensors of its own, as torchvision's StochasticDepth makes them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        noise = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype).bernoulli_(0.5)
        return self.conv(x) * noise + torch.randn(x.shape[-1], dtype=x.dtype)


def plain_tensors(world):
    import haloconv

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    model = haloconv.parallelize(Stochastic(), mesh)
    torch.manual_seed(mesh.get_coordinate()[0])
    x = shard(torch.ones(4, 2, 3, 10), mesh, [Shard(3)])
    before = torch.get_rng_state()
    first, second = model(x), model(x)
    assert not torch.equal(before, torch.get_rng_state())
    assert not torch.equal(full(first), full(second))
    torch.manual_seed(mesh.get_coordinate()[0])
    assert torch.equal(full(first), full(model(x)))
    with pytest.raises(ValueError, match="channels"):
        model(x[:, :1])
    torch.manual_seed(mesh.get_coordinate()[0])  # the failed forward has left nothing behind
    assert torch.equal(full(first), full(model(x)))
    haloconv.reset_comm_stats()
    model.eval()(x)
    return haloconv.comm_stats()["messages"], full(first)


@pytest.mark.parametrize("world", [2, 3])
def test_plain_random_tensors_agree_in_training(world):
    """Fails when ranks that are seeded differently make different plain tensors, which count as replicated."""
    results = run_ranks(world, plain_tensors, world)
    # Eval mode sends the convolution's halo alone: one message to each neighbour.
    assert [messages for messages, _ in results] == [1, *[2] * (world - 2), 1]
    for _, values in results:
        assert torch.equal(values, results[0][1])


def checkpointed():
    import haloconv
    from torch.utils.checkpoint import checkpoint

    mesh = mesh_of((2,))
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(4, 2, 3, padding=1)
    ).double()
    models = [haloconv.parallelize(copy.deepcopy(plain), mesh) for _ in range(2)]
    x = torch.randn(2, 2, 5, 9, dtype=torch.float64)
    grads = []
    for model, way in zip(models, (lambda m, x: m(x), lambda m, x: checkpoint(m, x, use_reentrant=False))):
        torch.manual_seed(3)
        (full(way(model, haloconv.distribute(x, mesh))) ** 2).sum().backward()
        grads.append([full(p.grad) for p in model.parameters()])
    for name, a, b in zip([n for n, _ in plain.named_parameters()], *grads):
        assert_close(a, b, name)


def test_a_checkpointed_forward_draws_the_same_again():
    """Fails when the recomputed forward has another mask: the gradient would be of another function."""
    run_ranks(2, checkpointed)


def compiled():
    import haloconv

    haloconv.enable_rules()
    mesh = mesh_of((2,))
    drop = torch.compile(lambda x: F.dropout(x, 0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    first, second = full(drop(ones(mesh))), full(drop(ones(mesh)))
    assert not torch.equal(first, second)
    strips = first.chunk(2, 3)
    assert not torch.equal(*strips)


def test_a_compiled_dropout_draws_anew_each_time():
    """Fails when the seed is burnt into the graph."""
    run_ranks(2, compiled, timeout=120)


METHODS = {
    "uniform_": (lambda x: x.uniform_(2, 4), 3.0),
    "normal_": (lambda x: x.normal_(1, 2), 1.0),
    "exponential_": (lambda x: x.exponential_(0.5), 2.0),
    "geometric_": (lambda x: x.geometric_(0.25), 4.0),
    "random_": (lambda x: x.random_(3, 8), 5.0),
    "random_ to": (lambda x: x.random_(11), 5.0),
    "bernoulli_": (lambda x: x.bernoulli_(0.3), 0.3),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3),
    "rand_like": (torch.rand_like, 0.5),
    "randn_like": (torch.randn_like, 0.0),
    "randint_like": (lambda x: torch.randint_like(x, 2, 5), 3.0),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.4, True)[0], 1.0),
    "alpha_dropout": (lambda x: F.alpha_dropout(x - 1, 0.3, True), 0.0),
    "rrelu": (lambda x: F.rrelu(-x, 0.2, 0.4, True), -0.3),
}


def distributions():
    import haloconv

    mesh = mesh_of((2,))
    torch.manual_seed(0)
    with haloconv.rules():
        for name, (draw, mean) in METHODS.items():
            values = full(draw(ones(mesh)))
            deviation = values.double().std().item() / values.numel() ** 0.5
            assert abs(values.double().mean().item() - mean) < 6 * deviation + 1e-9, name
            assert not torch.equal(*values.chunk(2, 3)), name


def test_every_method_has_its_distribution():
    run_ranks(2, distributions)
