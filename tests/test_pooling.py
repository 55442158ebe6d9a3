"""Max and average pooling of sharded tensors against unsplit ones."""

import functools

import pytest
import torch
import torch.nn.functional as F
from harness import full, mesh_of, raises_on_every_rank, run_ranks, shard
from rulecase import check, random
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.core

WINDOWS = [  # kernel, stride, padding, dilation
    (2, 2, 0, 1),
    (3, 2, 1, 1),
    (3, 1, 1, 1),
    (2, 1, 0, 2),
    (3, 3, 1, 1),
    (2, 3, 0, 1),
    ((3, 2), (1, 2), (1, 0), 1),
]
SHAPES = [(2, 3, 5, 7), (1, 2, 4, 12), (1, 2, 13, 3), (1, 1, 3, 3)]


def fits(shape, kernel, padding, dilation):
    pairs = [value if isinstance(value, tuple) else (value, value) for value in (kernel, padding, dilation)]
    return all(size + 2 * p >= d * (k - 1) + 1 for size, k, p, d in zip(shape[-2:], *pairs))


def max_and_average_cases():
    for kernel, stride, padding, dilation in WINDOWS:
        shapes = [shape for shape in SHAPES if fits(shape, kernel, padding, dilation)]
        for ceil_mode in (False, True):
            numbers = f"k={kernel} s={stride} p={padding} d={dilation} ceil={ceil_mode}"
            yield (
                f"max {numbers}",
                functools.partial(
                    F.max_pool2d,
                    kernel_size=kernel,
                    stride=stride,
                    padding=padding,
                    dilation=dilation,
                    ceil_mode=ceil_mode,
                ),
                shapes,
            )
            for count_include_pad, divisor in ((True, None), (False, None), (True, 5)):
                if dilation != 1:
                    continue
                yield (
                    f"average {numbers} {count_include_pad} {divisor}",
                    functools.partial(
                        F.avg_pool2d,
                        kernel_size=kernel,
                        stride=stride,
                        padding=padding,
                        ceil_mode=ceil_mode,
                        count_include_pad=count_include_pad,
                        divisor_override=divisor,
                    ),
                    shapes,
                )


def other_dims():
    return [
        ("3-D max", lambda x: F.max_pool3d(x, 3, 2, 1), [(1, 2, 5, 6, 7)]),
        ("3-D average", lambda x: F.avg_pool3d(x, (2, 3, 2), 2, (0, 1, 1)), [(1, 2, 5, 6, 7)]),
        ("no batch dim", lambda x: F.avg_pool3d(x, 2, 1), [(2, 4, 5, 6)]),
        ("1-D max", lambda x: F.max_pool1d(x, 3, 2, 1), [(2, 3, 11)]),
        ("1-D average", lambda x: F.avg_pool1d(x, 3, 2, 1), [(2, 3, 11), (1, 1, 2)]),
        ("LP", lambda x: F.lp_pool2d(x.abs() + 1, 2.0, (2, 3), 2), [(2, 3, 6, 9)]),
        ("no window reads the last columns", lambda x: F.max_pool2d(x, 1, (1, 3)), [(1, 2, 3, 9)]),
        ("few outputs", lambda x: F.avg_pool2d(x, (1, 7), (1, 7)), [(1, 2, 3, 9)]),
    ]


def grid(world):
    import haloconv

    with haloconv.rules():
        haloconv.reset_comm_stats()
        count = check(world, [*max_and_average_cases(), *other_dims()])
        assert "gather" not in haloconv.comm_stats()["by_op"]
    return count


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_pooling_equals_unsplit(world):
    """Fails when a window at a seam or at a global edge is pooled wrongly, or its gradient goes elsewhere."""
    assert min(run_ranks(world, grid, world, timeout=250)) > 100


def indices_are_global():
    import haloconv

    mesh = mesh_of((2,))
    x = random((2, 3, 6, 10))
    for dim in (2, 3):
        with haloconv.rules():
            want, where = F.max_pool2d(x, 3, 2, 1, return_indices=True)
            got, indices = F.max_pool2d(shard(x, mesh, [Shard(dim)]), 3, 2, 1, return_indices=True)
        assert torch.equal(full(got), want)
        assert torch.equal(full(indices), where)


def test_indices_of_a_maximum_are_global():
    """Fails when indices count from the shard's edge: unpooling would put values elsewhere."""
    run_ranks(2, indices_are_global)


def lowest_values():
    """All of a window -inf, where torch gives the first index inside the input; and NaN, which wins."""
    import haloconv

    mesh = mesh_of((2,))
    x = torch.full((1, 1, 4, 8), -torch.inf, dtype=torch.float64)
    for value in (-torch.inf, torch.nan):
        x[0, 0, 2, 3] = value
        for dim, dilation in ((2, 1), (3, 1), (3, 2)):
            with haloconv.rules():
                want, where = F.max_pool2d(x, 3, 1, 1, dilation, return_indices=True)
                got, indices = F.max_pool2d(
                    shard(x, mesh, [Shard(dim)]), 3, 1, 1, dilation, return_indices=True
                )
            assert torch.equal(full(got).nan_to_num(7.0), want.nan_to_num(7.0))
            assert torch.equal(full(indices), where), (value, dim)


def test_windows_of_lowest_values_and_nan():
    """Fails when padding is told from values: an index could point outside of the image."""
    run_ranks(2, lowest_values)


def half_precision():
    import haloconv

    mesh = mesh_of((2,))
    x = random((1, 4, 9, 11)).to(torch.bfloat16)
    with haloconv.rules():
        got = F.avg_pool2d(shard(x, mesh, [Shard(3)]), 3, 2, 1)
    assert got.dtype == torch.bfloat16
    exact = F.avg_pool2d(x.double(), 3, 2, 1)
    # Half a unit in the last place of bfloat16, and once more for the sum that is rounded before it is divided.
    torch.testing.assert_close(full(got).double(), exact, rtol=2**-7, atol=1e-3)


def test_half_precision():
    run_ranks(2, half_precision)


def compiled(world):
    import haloconv

    haloconv.enable_rules()
    mesh = mesh_of((world,))

    def pools(x):
        return F.avg_pool2d(F.max_pool2d(x, 3, 2, 1), 3, 1, 1, count_include_pad=False)

    x = random((1, 2, 6, 13))
    inputs = [shard(x, mesh, [Shard(3)]).requires_grad_() for _ in range(2)]
    outs = [
        function(x)
        for function, x in zip((pools, torch.compile(pools, backend="aot_eager", fullgraph=True)), inputs)
    ]
    for out in outs:
        out.to_local().sum().backward()
    assert torch.equal(full(outs[0]), full(outs[1]))
    assert torch.equal(full(inputs[0].grad), full(inputs[1].grad))


def test_compiles_in_one_graph():
    run_ranks(2, compiled, 2, timeout=120)


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(kernel_size=0), "kernel"),
        (dict(kernel_size=3, stride=0), "stride"),
        (dict(kernel_size=3, padding=2), "padding"),
        (dict(kernel_size=(3, 3, 3)), "kernel_size"),
        (dict(kernel_size=9), "spatial sizes"),
        (dict(kernel_size=3, padding=-1), "padding"),
    ],
)
def test_bad_arguments(options, text):
    """Fails when a rank would go on, or wait, with numbers that do not fit."""
    raises_on_every_rank(2, refused, options, match=text)


def refused(options):
    import haloconv

    with haloconv.rules():
        torch.ops.aten.avg_pool2d(shard(random((1, 2, 5, 6)), mesh_of((2,)), [Shard(3)]), **options)
