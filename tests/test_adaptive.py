"""Adaptive pooling of sharded tensors against unsplit ones, with few outputs and with many."""

import functools

import pytest
import torch
import torch.nn.functional as F
from harness import assert_close, full, mesh_of, raises_on_every_rank, run_ranks, shard
from rulecase import as_format, combinations, random
from torch.distributed.tensor import Replicate, Shard

pytestmark = pytest.mark.core

CASES = [  # input shape, output sizes
    ((2, 3, 7, 11), (1, 1)),
    ((2, 3, 7, 11), (7, 7)),
    ((1, 2, 5, 13), (3, None)),
    ((1, 2, 40, 41), (33, 35)),
    ((1, 2, 3, 2), (2, 6)),
    ((1, 2, 1, 1), (3, 5)),
    ((2, 4, 50), (2, 36)),
    ((1, 2, 5, 6, 7), (2, 3, 4)),
    ((1, 1, 3, 20, 34), (2, 17, 33)),
]


def pools(sizes):
    n = len(sizes)
    yield "average", functools.partial(getattr(F, f"adaptive_avg_pool{n}d"), output_size=sizes)
    yield "max", functools.partial(getattr(F, f"adaptive_max_pool{n}d"), output_size=sizes)


def grid(world):
    import haloconv

    count = 0
    with haloconv.rules():
        haloconv.reset_comm_stats()
        for turn, (shape, sizes) in enumerate(CASES):
            for name, pool in pools(sizes):
                formats = (False, True) if len(sizes) + 2 == len(shape) else (False,)
                for _, last, mesh, placements in combinations(world, [shape], formats, turn):
                    x = as_format(random(shape), last)
                    compare(mesh, placements, x, pool, f"{name} {shape} {sizes} {placements}")
                    count += 1
        assert "gather" not in haloconv.comm_stats()["by_op"]
    return count


def compare(mesh, placements, x, pool, what):
    """Few outputs come replicated, so the placements are the sharded one's own."""
    sharded, x = shard(x, mesh, placements).requires_grad_(), x.clone().requires_grad_()
    want, got = pool(x), pool(sharded)
    assert_close(full(got.detach()), want.detach(), what)
    grad = random(want.shape, 3)
    want.backward(grad)
    got.backward(shard(grad, mesh, got.placements))
    assert_close(full(sharded.grad), x.grad, f"gradient of {what}")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_adaptive_pooling_equals_unsplit(world):
    """Fails when a bin that spans shards is put together wrongly."""
    assert min(run_ranks(world, grid, world, timeout=250)) > 20


def placements():
    import haloconv

    mesh = mesh_of((2,))
    x = shard(random((1, 2, 64, 64)), mesh, [Shard(3)])
    with haloconv.rules():
        return [F.adaptive_avg_pool2d(x, size).placements[0] for size in (7, 32)]


def test_few_outputs_are_replicated_and_many_stay_sharded():
    """Fails when a classifier's 7 x 7 could not be flattened, or a large result would be on every rank."""
    assert run_ranks(2, placements)[0] == [Replicate(), Shard(3)]


def indices():
    import haloconv

    for size in ((3, 3), (5, 20)):
        x = random((2, 2, 6, 21))
        x[:, :, ::2] = x[:, :, 1::2]  # ties: the first one counts
        for dim in (2, 3):
            with haloconv.rules():
                want = F.adaptive_max_pool2d(x, size, return_indices=True)
                got = F.adaptive_max_pool2d(shard(x, mesh_of((2,)), [Shard(dim)]), size, return_indices=True)
            assert torch.equal(full(got[0]), want[0])
            assert torch.equal(full(got[1]), want[1]), (size, dim)


def test_indices_are_global():
    run_ranks(2, indices)


def compiled():
    import haloconv

    haloconv.enable_rules()

    def pooled(x):
        return F.adaptive_avg_pool2d(x, 3) + F.adaptive_max_pool2d(x, 3)

    inputs = [shard(random((1, 2, 7, 9)), mesh_of((2,)), [Shard(3)]).requires_grad_() for _ in range(2)]
    for function, x in zip((pooled, torch.compile(pooled, backend="aot_eager", fullgraph=True)), inputs):
        function(x).to_local().sum().backward()
    assert torch.equal(full(inputs[0].grad), full(inputs[1].grad))


def test_compiles_in_one_graph():
    run_ranks(2, compiled, timeout=120)


def refused():
    import haloconv

    with haloconv.rules():
        torch.ops.aten._adaptive_avg_pool2d(shard(random((1, 2, 5, 6)), mesh_of((2,)), [Shard(3)]), [0, 3])


def test_bad_sizes():
    raises_on_every_rank(2, refused, match="output_size")
