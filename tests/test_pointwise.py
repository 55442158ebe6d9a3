"""Elementwise ops of sharded tensors: equal to unsplit, sharded, and silent."""

import pytest
import torch
import torch.nn.functional as F
from harness import full, mesh_of, run_ranks, shard
from rulecase import check, random
from torch.distributed.tensor import Replicate, Shard

pytestmark = pytest.mark.core

SHAPES = [(2, 4, 3, 7), (1, 2, 5, 2), (2, 4, 1, 1)]
ACTIVATIONS = [
    "hardswish",
    "hardsigmoid",
    "hardtanh",
    "relu6",
    "mish",
    "softplus",
    "softshrink",
    "hardshrink",
    "leaky_relu",
    "elu",
    "celu",
    "selu",
    "silu",
    "gelu",
    "logsigmoid",
    "tanhshrink",
    "softsign",
    "relu",
    "sigmoid",
    "tanh",
    "rrelu",
]


def cases():
    for name in ACTIVATIONS:
        yield name, getattr(F, name), SHAPES
    yield "threshold", lambda x: F.threshold(x, 0.1, 20.0), SHAPES
    yield "gelu tanh", lambda x: F.gelu(x, approximate="tanh"), SHAPES
    yield "prelu", lambda x: F.prelu(x, torch.linspace(0.1, 0.4, x.shape[1], dtype=x.dtype)), SHAPES
    yield "one slope", lambda x: F.prelu(x, torch.full((1,), 0.3, dtype=x.dtype)), SHAPES
    yield "glu over channels", lambda x: F.glu(x, 1), SHAPES
    yield "floor_divide", lambda x: x + torch.floor_divide(x.detach(), 0.3), SHAPES
    yield "clamp", lambda x: x.clamp(-0.5, 0.5) + x.clamp(min=0), SHAPES
    yield "where", lambda x: torch.where(x > 0, x, 2 * x), SHAPES
    yield "masked_fill", lambda x: x.masked_fill(x > 0.5, 0.0), SHAPES
    yield "logit", lambda x: torch.logit(x.sigmoid(), 1e-6), SHAPES
    yield (
        "plain weights along the width",
        lambda x: x * torch.linspace(0, 1, x.shape[-1], dtype=x.dtype),
        SHAPES,
    )
    yield "in place", lambda x: F.hardswish(F.relu6(x * 2, inplace=True) - 1, inplace=True), SHAPES
    yield "in place, leaky", lambda x: F.leaky_relu((x * 2), 0.2, inplace=True), SHAPES
    yield "in place, elu", lambda x: F.elu((x * 2), inplace=True), SHAPES


def grid(world):
    import haloconv
    from haloconv import _dtensor

    _dtensor.allow_implicit_replication()
    with haloconv.rules():
        haloconv.reset_comm_stats()
        count = check(world, cases(), channels_last=(False,))
        assert haloconv.comm_stats()["messages"] == 0
    return count


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equal_to_unsplit_and_silent(world):
    """Fails when an activation function gathers, sends anything, or has no backward."""
    assert min(run_ranks(world, grid, world, timeout=250)) > 50


def mixed():
    """Operands that lie differently: the sharded one decides, and a dim that broadcasts stays whole."""
    import haloconv

    mesh = mesh_of((2, 2))
    x, column, row = random((2, 3, 5, 7)), random((5, 1), 1), random((3, 1, 7), 2)
    with haloconv.rules():
        got = torch.ops.aten.floor_divide(
            shard(x, mesh, [Shard(2), Replicate()]), shard(row, mesh, [Replicate(), Shard(2)])
        )
        assert torch.equal(full(got), torch.floor_divide(x, row))
        assert got.placements == (Shard(2), Shard(3))
        got = torch.ops.aten.floor_divide(
            shard(column, mesh, [Replicate(), Replicate()]), shard(x, mesh, [Shard(3), Shard(2)])
        )
        assert torch.equal(full(got), torch.floor_divide(column, x))


def test_operands_that_lie_differently():
    run_ranks(4, mixed)


def glu_along_the_width(world):
    import haloconv

    with haloconv.rules():
        return check(world, [("glu", lambda x: F.glu(x, 3), [(2, 3, 2, 10), (1, 1, 2, 2)])], (False,))


@pytest.mark.parametrize("world", [2, 3])
def test_glu_along_the_width(world):
    run_ranks(world, glu_along_the_width, world)
