"""Resampling of sharded tensors against unsplit ones: every mode, up and down."""

import functools

import pytest
import torch
import torch.nn.functional as F
from harness import full, mesh_of, raises_on_every_rank, run_ranks, shard
from rulecase import check, random
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.core

MODES = {
    "nearest": {},
    "nearest-exact": {},
    "bilinear": {},
    "bilinear aligned": dict(align_corners=True),
    "bicubic": {},
    "bicubic aligned": dict(align_corners=True),
    "bilinear antialiased": dict(antialias=True),
    "bicubic antialiased": dict(antialias=True),
}
SIZES = [  # (H, W), output size or scale
    ((4, 6), dict(size=(8, 12))),
    ((5, 7), dict(size=(3, 17))),
    ((3, 13), dict(size=(5, 4))),
    ((6, 5), dict(scale_factor=2)),
    ((6, 9), dict(scale_factor=(0.5, 1.7))),
    ((3, 4), dict(scale_factor=(3.0, 2.5), recompute_scale_factor=True)),
    ((2, 1), dict(size=(4, 9))),
    ((4, 10), dict(size=(4, 2))),
]


def cases():
    for mode, options in MODES.items():
        for (height, width), target in SIZES:
            yield (
                f"{mode} {target}",
                functools.partial(F.interpolate, mode=mode.split()[0], **options, **target),
                [(1, 4, height, width)],
            )


def other_dims():
    volume = [(1, 2, 3, 4, 5)]
    for mode, aligned in (
        ("trilinear", True),
        ("trilinear", False),
        ("nearest", None),
        ("nearest-exact", None),
    ):
        for target in (dict(scale_factor=2), dict(size=(5, 3, 8))):
            yield mode, functools.partial(F.interpolate, mode=mode, align_corners=aligned, **target), volume

    for mode in ("linear", "nearest", "nearest-exact"):
        yield mode, functools.partial(F.interpolate, mode=mode, size=11), [(1, 2, 7), (2, 3, 2)]


def grid(world, part):
    import haloconv

    everything = [*cases(), *other_dims()]
    with haloconv.rules():
        haloconv.reset_comm_stats()
        count = check(world, everything[part::2])
        assert "gather" not in haloconv.comm_stats()["by_op"]
    return count


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resizing_equals_unsplit(world, part):
    """Fails when an output near a seam reads the wrong pixel, or its weights or gradient are off."""
    assert min(run_ranks(world, grid, world, part, timeout=250)) > 50


def single_precision():
    import haloconv

    mesh = mesh_of((2,))
    for height, width, out in ((3, 41, (7, 2)), (2, 2, (41, 47)), (5, 70, (5, 43))):
        x = random((1, 1, height, width), dtype=torch.float32)
        for mode in ("nearest", "nearest-exact"):
            with haloconv.rules():
                got = F.interpolate(shard(x, mesh, [Shard(3)]), out, mode=mode)
            assert torch.equal(full(got), F.interpolate(x, out, mode=mode))
    x = random((1, 4, 9, 11), dtype=torch.float32)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        with haloconv.rules():
            got = F.interpolate(shard(x.to(dtype), mesh, [Shard(3)]), scale_factor=2, mode="bilinear")
        assert got.dtype == dtype
        exact = F.interpolate(x.to(dtype).double(), scale_factor=2, mode="bilinear")
        torch.testing.assert_close(full(got).double(), exact, rtol=tolerance, atol=tolerance)


def test_the_very_pixel_in_single_precision():
    """Fails when nearest picks a neighbour: in float, a rounded product decides."""
    run_ranks(2, single_precision)


def compiled():
    import haloconv

    haloconv.enable_rules()
    mesh = mesh_of((2,))

    def resized(x):
        x = F.interpolate(x, scale_factor=2, mode="bilinear")
        return F.interpolate(F.interpolate(x, (5, 7), mode="bicubic"), (9, 11), mode="nearest")

    inputs = [shard(random((1, 2, 4, 9)), mesh, [Shard(3)]).requires_grad_() for _ in range(2)]
    functions = (resized, torch.compile(resized, backend="aot_eager", fullgraph=True))
    outs = [function(x) for function, x in zip(functions, inputs)]
    for out in outs:
        out.to_local().sum().backward()
    assert torch.equal(full(outs[0]), full(outs[1]))
    torch.testing.assert_close(full(inputs[0].grad), full(inputs[1].grad))


def test_compiles_in_one_graph():
    run_ranks(2, compiled, timeout=120)


def few_bytes():
    """What a rank sends for a bilinear upsampling is a column or two of the input."""
    import haloconv

    mesh = mesh_of((2,))
    with haloconv.rules():
        haloconv.reset_comm_stats()
        F.interpolate(shard(random((1, 2, 8, 32)), mesh, [Shard(3)]), scale_factor=2, mode="bilinear")
    return haloconv.comm_stats()["bytes"]


def test_only_the_halo_is_sent():
    assert run_ranks(2, few_bytes) == [2 * 8 * 8, 2 * 8 * 8]


def refused(size):
    import haloconv

    with haloconv.rules():
        torch.ops.aten.upsample_bilinear2d(
            shard(random((1, 2, 5, 6)), mesh_of((2,)), [Shard(3)]), size, False
        )


@pytest.mark.parametrize("size", [[0, 4], [4, -1], [4]])
def test_bad_sizes(size):
    raises_on_every_rank(2, refused, size, match="output_size")
