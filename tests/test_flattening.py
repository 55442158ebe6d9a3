"""Tensors flattened over sharded dims, as losses do it: equal to unsplit, moved by all-to-all, never gathered."""

import pytest
import torch
import torch.nn.functional as F
from harness import full, mesh_of, run_ranks, shard
from rulecase import random
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.core


def dice(flat):
    def loss(p, t):
        p, t = flat(p.sigmoid()), flat(t)
        return (1 - (2 * (p * t).sum(-1) + 1) / (p.sum(-1) + t.sum(-1) + 1)).mean()

    return loss


def gram(p, _):
    rows = p.flatten(2)
    return (rows @ rows.transpose(1, 2)).square().mean()


LOSSES = {
    "dice, pixels": dice(lambda x: x.flatten(2)),
    "dice, all": dice(lambda x: x.reshape(-1)),
    "softmax of pixels": lambda p, t: (F.softmax(p.flatten(2), 2) * t.flatten(2)).sum(2).square().mean(),
    "gram": gram,
    "cross-entropy of rows": lambda p, t: F.cross_entropy(
        p.permute(0, 2, 3, 1).reshape(-1, p.shape[1]), t.argmax(1).reshape(-1)
    ),
}


class Collectives(TorchDispatchMode):
    """The names of collectives. It steps aside on DTensors: those that they are made of come past only then."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def losses(shape, dims):
    import haloconv

    mesh, placements = mesh_of(shape), [Shard(dim) for dim in dims]
    with haloconv.rules():
        for size in ((2, 3, 5, 7), (1, 2, 4, 6), (2, 1, 3, 2)):
            x, target = random(size), random(size, 1).sigmoid()
            for name, loss in LOSSES.items():
                plain, split = x.clone().requires_grad_(), shard(x, mesh, placements).requires_grad_()
                want = loss(plain, target)
                want.backward()
                with Collectives() as seen:
                    got = loss(split, shard(target, mesh, placements))
                    got.backward()
                where = f"{name}, {size}, {placements}"
                torch.testing.assert_close(full(got), want, msg=lambda text, where=where: f"{where}: {text}")
                torch.testing.assert_close(
                    full(split.grad), plain.grad, msg=lambda text, where=where: f"{where}: {text}"
                )
                gathers = {name for name in seen.names if "gather" in name}
                assert not gathers, f"{where}: {gathers}"


@pytest.mark.parametrize("world, dim", [(2, 3), (2, 2), (3, 3)])
def test_losses_over_flattened_images(world, dim):
    """Fails when flattening a sharded image is refused, wrong, or gathers it."""
    run_ranks(world, losses, (world,), (dim,))


def resharding():
    import haloconv
    from haloconv._layout import moved_to

    mesh = mesh_of((3,))
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.int64):
        for size in ((2, 3, 5, 7), (2, 1, 2, 2), (0, 3, 4, 4)):
            x = (random(size) * 3).to(dtype)
            for last in (False, True):
                x = x.to(memory_format=torch.channels_last) if last else x
                haloconv.reset_comm_stats()
                got = moved_to(shard(x, mesh, [Shard(3)]), [Shard(2)])
                assert got.placements == (Shard(2),) and torch.equal(full(got), x)
                own = shard(x, mesh, [Shard(3)]).to_local().nbytes
                assert haloconv.comm_stats()["bytes"] <= own


def test_resharding_moves_each_element_once():
    run_ranks(3, resharding)
