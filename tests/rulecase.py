"""A grid of meshes, placements and sizes for the tests of one op: unsplit against sharded, in values and gradients.

`check(world, cases)` runs on a worker. A case is (name, function of a tensor, shapes); each function runs for each
shape on each layout of the world whose dims the shape has.
"""

import itertools

import torch
from harness import check_same, mesh_of
from torch.distributed.tensor import Shard

# world: (mesh shape, the tensor dim that each mesh dim shards)
LAYOUTS = {
    1: [((1,), (3,)), ((1,), (2,))],
    2: [((2,), (3,)), ((2,), (2,)), ((2,), (0,)), ((2,), (4,))],
    3: [((3,), (3,)), ((3,), (2,))],
    4: [((4,), (3,)), ((4,), (2,)), ((2, 2), (2, 3)), ((2, 2), (0, 3)), ((2, 2), (3, 2))],
}


def layouts(world, ndim):
    """(mesh, placements) whose dims a tensor of `ndim` dims has."""
    for shape, dims in LAYOUTS[world]:
        if all(dim < ndim for dim in dims):
            yield mesh_of(shape), tuple(Shard(dim) for dim in dims)


def random(shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def check(world, cases, channels_last=(False, True)):
    """Every case on every layout; returns how many were compared. The rules have to be on."""
    count = 0
    for name, function, shapes in cases:
        for shape, last in itertools.product(shapes, channels_last):
            if last and len(shape) not in (4, 5):
                continue
            x = random(shape)
            if last:
                x = x.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
            for mesh, placements in layouts(world, len(shape)):
                try:
                    check_same(mesh, placements, function, x, function)
                except Exception as error:
                    where = (
                        f"{name} on {tuple(shape)}, {tuple(mesh.shape)}, {placements}, channels_last={last}"
                    )
                    raise AssertionError(f"{where}: {error}") from error
                count += 1
    return count
