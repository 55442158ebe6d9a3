"""A grid of meshes, placements and sizes for the tests of one op: unsplit against sharded, in values and gradients.

`check(world, cases)` runs on a worker. A case is (name, function of a tensor, shapes); each function runs on layouts of
the world whose dims the shape has: see `combinations`.
"""

import os

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


def has_format(shape, last):
    """Whether a tensor of that shape can be channels-last, where that is asked for."""
    return not last or len(shape) in (4, 5)


def combinations(world, shapes, formats, turn):
    """(shape, channels-last or not, mesh, placements) that one case runs on; `turn` counts the cases.

    With HALOCONV_LONG=1 that is the whole product. Else, on up to 3 ranks, every shape on every layout, the formats
    taking turns; on 4 ranks every layout and every shape, with formats and shapes that take turns. A family's cases,
    which share their code, so see the whole product between them.
    """
    whole = [
        (shape, last, mesh, placements)
        for shape in shapes
        for last in formats
        if has_format(shape, last)
        for mesh, placements in layouts(world, len(shape))
    ]
    if os.environ.get("HALOCONV_LONG") == "1":
        return whole
    rest = {}  # what has to be covered: of each, the one whose turn it is
    for shape, last, mesh, placements in whole:
        layout = (tuple(mesh.shape), placements)
        covered = (shape, layout) if world < 4 else (len(shape), layout)
        rest.setdefault(covered, []).append((shape, last, mesh, placements))
    chosen = [choices[(turn + number) % len(choices)] for number, choices in enumerate(rest.values())]
    seen = {shape for shape, *_ in chosen}
    return chosen + list({c[0]: c for c in whole if c[0] not in seen}.values())


def as_format(x, last):
    """In channels-last memory format, if `last`."""
    if not last:
        return x
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def random(shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def check(world, cases, channels_last=(False, True)):
    """Every case on its combinations; returns how many were compared. The rules have to be on."""
    count = 0
    for turn, (name, function, shapes) in enumerate(cases):
        for shape, last, mesh, placements in combinations(world, shapes, channels_last, turn):
            try:
                check_same(mesh, placements, function, as_format(random(shape), last), function)
            except Exception as error:
                where = f"{name} on {tuple(shape)}, {tuple(mesh.shape)}, {placements}, channels_last={last}"
                raise AssertionError(f"{where}: {error}") from error
            count += 1
    return count
