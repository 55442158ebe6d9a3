"""F.unfold and F.fold of sharded tensors against unsplit ones."""

import functools

import pytest
import torch
import torch.nn.functional as F
from harness import assert_shards, check_same, mesh_of, raises_on_every_rank, run_ranks, shard
from rulecase import random
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.core

WINDOWS = [  # kernel, dilation, padding, stride
    (3, 1, 1, 1),
    (2, 1, 0, 2),
    ((3, 2), (1, 2), (2, 0), (2, 1)),
    ((1, 3), 1, 0, 3),
]
SHAPES = [(2, 3, 5, 7), (1, 2, 9, 3), (1, 1, 3, 13)]


def there_and_back(x, size, numbers):
    columns = F.unfold(x, *numbers)
    return F.fold(columns.sin(), size, *numbers)


def grid(world):
    import haloconv

    haloconv.enable_rules()
    meshes = [((world,), (3,)), ((world,), (2,)), ((world,), (0,))]
    if world == 4:
        meshes.append(((2, 2), (0, 3)))
    for shape in SHAPES:
        for numbers in WINDOWS:
            for sizes, dims in meshes:
                mesh, placements = mesh_of(sizes), tuple(map(Shard, dims))
                columns = tuple(Shard(min(dim, 2)) for dim in dims)
                unfold = functools.partial(
                    F.unfold,
                    kernel_size=numbers[0],
                    dilation=numbers[1],
                    padding=numbers[2],
                    stride=numbers[3],
                )
                both = functools.partial(there_and_back, size=shape[2:], numbers=numbers)
                x = random(shape)
                try:
                    if world > 1 or dims != (3,):
                        check_same(mesh, placements, unfold, x, unfold, out_placements=columns)
                        check_same(mesh, placements, both, x, both)
                except Exception as error:
                    raise AssertionError(f"{shape} {numbers} {dims}: {error}") from error
                if 0 not in dims:
                    y = unfold(x)[0]
                    fold = functools.partial(
                        F.fold,
                        output_size=shape[2:],
                        kernel_size=numbers[0],
                        dilation=numbers[1],
                        padding=numbers[2],
                        stride=numbers[3],
                    )
                    got = fold(shard(y, mesh, (Shard(1),)))
                    assert_shards(got, fold(y), got.placements, "fold without batch")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_unfold_and_fold(world):
    run_ranks(world, grid, world, timeout=120)


def compiled(world):
    import haloconv

    haloconv.enable_rules()
    function = functools.partial(there_and_back, size=(5, 8), numbers=(3, 1, 1, 1))
    torch._dynamo.reset()
    traced = torch.compile(function, fullgraph=True, backend="aot_eager")
    check_same(mesh_of((world,)), (Shard(2),), function, random((2, 3, 5, 8)), traced)


def test_compiles_as_one_graph():
    run_ranks(2, compiled, 2, timeout=200)


def bad(kernel):
    import haloconv

    haloconv.enable_rules()
    F.unfold(shard(random((1, 2, 4, 5)), mesh_of((2,)), (Shard(3),)), kernel)


def bad_fold(size):
    import haloconv

    haloconv.enable_rules()
    F.fold(shard(random((1, 8, 12)), mesh_of((2,)), (Shard(2),)), size, 2)


def test_bad_arguments():
    raises_on_every_rank(2, bad, 6, match="kernel_size is")
    raises_on_every_rank(2, bad_fold, (5, 5), match="input has shape")
