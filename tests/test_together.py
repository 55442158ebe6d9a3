"""haloconv together with what surrounds it in a real program: torch's own DTensor rules between two convolutions, other
wrappers, copies, and errors that only one rank has.

Values are float64 and equal to the unsplit computation at 1e-9.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import assert_close, full, mesh_of, raises_on_every_rank, run_ranks
from parallelcase import make

BETWEEN = {
    "batch norm": lambda: nn.BatchNorm2d(16),
    "max pool": lambda: nn.MaxPool2d(3, 2, 1),
    "upsample": lambda: nn.Upsample(scale_factor=2),
    "relu": lambda: nn.ReLU(),
}


def torchs_rule_between(world, between, training):
    import haloconv

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), BETWEEN[between](), nn.Conv2d(16, 4, 3, padding=1))
    plain = plain.double().train(training)
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh_of((world,)))
    x = torch.randn(2, 3, 33, 33, dtype=torch.float64)  # large enough that torch shards channels
    out = haloconv.gather(sharded(haloconv.distribute(x, mesh_of((world,)))))
    expected = plain(x)
    assert_close(out, expected, "output")
    (out**2).mean().backward()
    (expected**2).mean().backward()
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters()):
        assert_close(full(q.grad), p.grad, f"gradient of {name}")
    for (name, p), q in zip(plain.named_buffers(), sharded.buffers()):
        assert_close(full(q).double(), p.double(), f"buffer {name}")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("world", [2, 3])
def test_layers_that_torch_shards_by_channels_stand_between_convolutions(world, between, training):
    """Fails when a convolution refuses, or gets wrong, what torch's rules make of the layer before it, or when the
    running statistics of a batch norm are left behind."""
    run_ranks(world, torchs_rule_between, world, between, training)


def undone_copy():
    import haloconv

    mesh = mesh_of((2,))
    plain = make()
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh, gather_outputs=True)
    undone = haloconv.unparallelize(copy.deepcopy(sharded))
    x = torch.randn(2, 3, 6, 18, dtype=torch.float64)
    assert_close(undone(x), plain(x), "output of the undone copy")
    assert_close(sharded(haloconv.distribute(x, mesh)), plain(x), "output of the original")


def test_a_copy_can_be_undone():
    """Fails when a deep copy keeps hooks that unparallelize does not find."""
    run_ranks(2, undone_copy)


def wrapped_by_ddp():
    import haloconv

    haloconv.parallelize(nn.parallel.DistributedDataParallel(make()), mesh_of((2,)))


def test_ddp_inside_is_refused():
    """Fails when parallelize replaces parameters that a DistributedDataParallel goes on watching."""
    raises_on_every_rank(2, wrapped_by_ddp, match="DistributedDataParallel")


def one_rank_fails_where_nobody_waits(shape):
    import haloconv

    mesh = mesh_of(shape)
    dim = (0, 3) if len(shape) == 2 else -1
    pointwise = haloconv.parallelize(nn.Conv2d(3, 4, 1).double(), mesh, dim)
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3, padding=1).double()
    wide = haloconv.parallelize(copy.deepcopy(plain), mesh, dim)
    last = dist.get_rank() == dist.get_world_size() - 1
    x = torch.randn(2, 4 if last else 3, 6, 8, dtype=torch.float64)
    try:
        pointwise(haloconv.distribute(x, mesh, dim))
        assert not last
    except ValueError:
        assert last
    dist.barrier()
    x = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_close(full(wide(haloconv.distribute(x, mesh, dim))), plain(x), "output after the error")


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_an_error_where_nobody_waits_stays_with_its_rank(shape):
    """Fails when a report that no rank is waiting for is taken for one about a later exchange."""
    run_ranks(4 if len(shape) == 2 else 2, one_rank_fails_where_nobody_waits, shape)


def unlike_slabs(kind):
    import haloconv

    rank = dist.get_rank()
    slab = torch.zeros(1, 3, 4, 4)
    if rank == 1:
        slab = {
            "dims": slab[0],
            "batch": slab.expand(2, 3, 4, 4),
            "dtype": slab.double(),
            "width": slab[..., :3],
        }[kind]
    haloconv.distribute_local(slab, mesh_of((2,)), size=8 if kind == "width" else None)


@pytest.mark.parametrize("kind", ["dims", "batch", "dtype", "width"])
def test_slabs_that_do_not_fit_together_raise_on_every_rank(kind):
    """Fails when a wrong slab goes through, or stays one rank's secret."""
    raises_on_every_rank(2, unlike_slabs, kind, match="local has")
