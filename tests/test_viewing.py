"""Views that merge or split a sharded dim, columns that are repeated, and masked writes: equal to unsplit on shards
that are not even, without a gather."""

import pytest
import torch
import torch.nn.functional as F
from harness import assert_close, assert_shards, local_part, mesh_of, run_ranks, shard


def put(x, mask, value):
    x = x.clone()
    x[mask] = value
    return x


# Of a tensor (2, 4, 6, 10), with the output's sharded dim where the input's last is sharded.
OPS = {
    "nearest by hand": (
        lambda x: x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 3).reshape(2, 4, 12, 30),
        3,
    ),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, dim=3), 3),
    "space to depth": (
        lambda x: x.reshape(2, 4, 3, 2, 5, 2).permute(0, 1, 3, 5, 2, 4).reshape(2, 16, 3, 5),
        3,
    ),
    "depth to space": (
        lambda x: x.reshape(2, 1, 2, 2, 6, 10).permute(0, 1, 4, 2, 5, 3).reshape(2, 1, 12, 20),
        3,
    ),
    "windows": (lambda x: x.view(2, 4, 2, 3, 5, 2).permute(0, 2, 4, 3, 5, 1).softmax(-1), 2),
    "split": (lambda x: x.view(2, 4, 6, 2, 5) * torch.arange(5, dtype=x.dtype), 3),
    "columns merged with rows": (lambda x: x.transpose(2, 3).reshape(2, 4, 60).tanh(), 2),
    "all but the batch": (lambda x: x.permute(0, 3, 1, 2).flatten(1).tanh(), 1),
    "other columns": (lambda x: x.permute(0, 3, 1, 2).reshape(2, 40, 6) * 2, 1),
    "repeat": (lambda x: x.repeat(1, 1, 2, 3) * torch.linspace(0, 1, 30, dtype=x.dtype), 3),
    "one column expanded": (lambda x: F.lp_pool2d(x.exp(), 2, (6, 10)).expand(-1, -1, 6, 10) * x, 3),
    "mask": (lambda x: put(x, x > 0.3, 2.0), 3),
    "mask of the batch": (lambda x: put(x, torch.tensor([False, True]), 2.0), 3),
    "plain mask": (lambda x: put(x, (torch.arange(480) % 7 == 0).view(2, 4, 6, 10), 2.0), 3),
}


def compare(world, name):
    import haloconv
    from torch.distributed.tensor import Shard

    function, dim = OPS[name]
    mesh = mesh_of((world,))
    haloconv.parallelize(torch.nn.Identity(), mesh)  # plain tensors count as replicated
    x = torch.randn(2, 4, 6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    xs = shard(x, mesh, [Shard(3)]).requires_grad_()
    x.requires_grad_()
    want = function(x)
    grad = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).reshape(want.shape)
    haloconv.reset_comm_stats()
    got = function(xs)
    assert_shards(got, want, [Shard(dim)], name)
    want.backward(grad)
    got.backward(shard(grad, mesh, [Shard(dim)]))
    assert "gather" not in haloconv.comm_stats()["by_op"], name
    assert_close(xs.grad.full_tensor(), x.grad, f"input gradient of {name}")


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("name", OPS)
def test_equal_to_unsplit(name, world):
    """Fails when an uneven sharded dim cannot be merged, split, repeated or written to, or wrong columns come out."""
    run_ranks(world, compare, world, name)


def index_shards():
    import haloconv

    mesh = mesh_of((3,))
    haloconv.parallelize(torch.nn.Identity(), mesh)
    refused = 0
    for write in (
        lambda x: x.__setitem__((..., torch.tensor([0, 5])), 1.0),
        lambda x: x.__setitem__((..., torch.arange(10) > 4), 1.0),
        lambda x: x.__setitem__((torch.arange(480) % 2 == 0).view(2, 4, 6, 10), torch.ones(240)),
    ):
        try:
            write(haloconv.distribute(torch.randn(2, 4, 6, 10), mesh))
        except RuntimeError as error:
            assert "has no sharded form" in str(error), error
            refused += 1
    x = torch.arange(480.0).view(2, 4, 6, 10)
    xs = haloconv.distribute(x, mesh)
    for tensor in (x, xs):
        tensor[:, torch.tensor([0, 2])] = 1.0
    assert_close(xs.to_local(), local_part(x, mesh, xs.placements), "written channels")
    return refused


def test_indices_of_a_sharded_dim_are_refused():
    """Fails when an index into the whole image is taken for one into this rank's strip."""
    assert run_ranks(3, index_shards) == [3] * 3
