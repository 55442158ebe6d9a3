"""Slices, cat, flip, roll, pixel shuffle and their kin on sharded tensors against unsplit ones; lost writes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from harness import (
    assert_close,
    assert_replicated,
    assert_shards,
    check_same,
    mesh_of,
    raises_on_every_rank,
    run_ranks,
    shard,
)
from rulecase import check, layouts, random
from torch.distributed.tensor import Replicate, Shard

pytestmark = pytest.mark.core

SHAPES = [(2, 4, 5, 7), (1, 4, 13, 3)]


def cut(dim, start, stop, step, x):
    return torch.ops.aten.slice.Tensor(x, dim, start, stop, step)


def nth(function, index, x):
    return function(x)[index]


def slices():
    for dim in (1, 2, 3):
        for start, stop, step in [
            (1, None, 1),
            (None, -1, 1),
            (1, -1, 2),
            (None, None, 3),
            (2, 3, 1),
            (-2, None, 1),
            (5, 2, 1),
        ]:
            yield f"slice {dim} {start}:{stop}:{step}", functools.partial(cut, dim, start, stop, step), SHAPES
    yield "slice batch", lambda x: x[-1:], SHAPES
    yield "both", lambda x: x[:, 1:, ::2, -2:], SHAPES
    yield "narrow", lambda x: x.narrow(3, 2, 3) * x.narrow(-1, 0, 3), SHAPES[:1]
    yield "split", lambda x: [p.sin() for p in x.split(2, 3)][-1] + x.split(2, 3)[-1], SHAPES
    yield "sizes", functools.partial(nth, lambda x: x.split([3, 0, 4], 3), 2), SHAPES[:1]
    yield "chunk", lambda x: torch.cat([p * (i + 1) for i, p in enumerate(x.chunk(3, 2))], 2), SHAPES
    yield "tensor_split", lambda x: torch.cat(x.tensor_split(2, 3)[::-1], 3), SHAPES
    yield "diff", lambda x: x.diff(dim=2).abs(), SHAPES
    yield (
        "total variation",
        lambda x: (x[:, :, 1:] - x[:, :, :-1]).abs()[..., 1:] + (x[..., 1:] - x[..., :-1])[:, :, 1:],
        SHAPES[:2],
    )


def moves():
    for dims in [(3,), (2,), (2, 3), (0, 1), (-1, 1)]:
        yield f"flip {dims}", functools.partial(torch.flip, dims=dims), SHAPES
    for shifts, dims in [(1, 3), (-2, 2), (100, 3), ((2, -1), (2, 3)), ((1, 1), (1, 0)), ((1, 2), (3, 3))]:
        yield f"roll {shifts} {dims}", functools.partial(torch.roll, shifts=shifts, dims=dims), SHAPES
    yield "cat", lambda x: torch.cat([x, x.sin(), x * 2], 3), SHAPES
    yield "cat 2", lambda x: torch.cat([x[:, :, 1:], x, x[:, :, :0]], 2), SHAPES
    yield "cat channels", lambda x: torch.cat([x, x.sin()[:, :1]], 1), SHAPES
    yield "cat batch", lambda x: torch.cat([x, x.sin()], 0), SHAPES
    yield "shuffle", lambda x: F.pixel_shuffle(x, 2), SHAPES
    yield "unshuffle", lambda x: F.pixel_unshuffle(x, 2), [(2, 3, 6, 10), (1, 1, 2, 6)]
    yield "unshuffle 3", lambda x: F.pixel_unshuffle(x, 3), [(2, 1, 3, 15), (1, 2, 12, 3)]
    yield "channel shuffle", lambda x: F.channel_shuffle(x, 2), SHAPES
    yield "windows", lambda x: x.unfold(3, 2, 1).sum(-1), SHAPES[:2]
    yield "windows 2", lambda x: x.unfold(2, 3, 2).amax(-1), SHAPES[:2]
    yield "half turn", lambda x: torch.rot90(x, 2, (2, 3)), SHAPES
    yield "repeat", lambda x: x.repeat(1, 3, 1, 1), SHAPES
    yield "slice_scatter", lambda x: torch.slice_scatter(x, x[..., 1::2].sin(), 3, 1, None, 2), SHAPES
    yield "slice_scatter 2", lambda x: torch.slice_scatter(x, x[:, :, :2].sin(), 2, 1, 3), SHAPES
    yield "select_scatter", lambda x: torch.select_scatter(x, x[:, :, 1].sin(), 2, -1), SHAPES


def others():
    volumes = [(2, 4, 3, 5, 6), (1, 8, 2, 7, 3)]
    yield "slice", lambda x: x[:, :, 1:, ::2, :-1], volumes
    yield "flip", lambda x: x.flip(2, 3, 4), volumes
    yield "roll", lambda x: x.roll((1, 2, 1), (2, 3, 4)), volumes
    yield "cat", lambda x: torch.cat([x, x[..., 1:, :]], -2), volumes
    yield "unbatched", lambda x: F.pixel_shuffle(x, 2), [(4, 3, 5), (8, 5, 2)]


def grid(world, cases):
    import haloconv

    haloconv.enable_rules()
    cases = list(cases())
    return check(world, cases, (False,)) + check(world, cases[::6], (True,))


@pytest.mark.parametrize("cases", [slices, moves])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_images(world, cases):
    assert run_ranks(world, grid, world, cases, timeout=120)[0] > 0


@pytest.mark.parametrize("world", [2, 4])
def test_volumes(world):
    run_ranks(world, volumes, world, timeout=120)


def volumes(world):
    """The output may lie in other dims than the input: only values and gradients are compared."""
    import haloconv

    haloconv.enable_rules()
    for name, function, shapes in others():
        for shape in shapes:
            for mesh, placements in layouts(world, len(shape)):
                if name != "unbatched" or Shard(0) not in placements:  # its channels
                    same(mesh, placements, function, shape, name)


def same(mesh, placements, function, shape, what):
    x = random(shape).requires_grad_()
    xs = shard(x, mesh, placements).requires_grad_()
    want, got = function(x), function(xs)
    what = f"{what} {shape} {placements}"
    assert_shards(got, want, got.placements, what)
    grad = random(want.shape, 3)
    want.backward(grad)
    got.backward(shard(grad, mesh, got.placements))
    assert_shards(
        xs.grad, x.grad, placements if mesh.size() > 1 else xs.grad.placements, f"gradient of {what}"
    )


def changed_dims(world):
    import haloconv

    haloconv.enable_rules()
    cases = [
        ("select", lambda x: x[..., 2]),
        ("select last", lambda x: x.select(3, -1) + x.select(3, 0)),
        ("select row", lambda x: x[:, :, 1]),
        ("select channel", lambda x: x[:, 1]),
        ("select image", lambda x: x[1]),
        ("turn", lambda x: torch.rot90(x, 1, (2, 3))),
        ("turn back", lambda x: torch.rot90(x, -1, (2, 3))),
        ("stack", lambda x: torch.stack([x, x.sin()], 2)),
        ("stack last", lambda x: torch.stack([x, x.sin()], -1)),
        ("swap", lambda x: x.movedim(1, -1)[:, 1:, :-1]),
        ("permute", lambda x: x.permute(3, 0, 2, 1)),
        ("windows", lambda x: x.unfold(3, 3, 2).unfold(2, 2, 2)),
        ("unsqueeze", lambda x: x.unsqueeze(2)[..., 1:].squeeze(2)),
    ]
    for name, function in cases:
        for mesh, placements in layouts(world, 4):
            same(mesh, placements, function, (2, 4, 5, 7), name)
    if world == 2:
        mesh, placements = mesh_of((2,)), (Shard(3),)
        xs = shard(random((2, 4, 5, 7)), mesh, placements)
        assert_replicated(xs[..., 2], random((2, 4, 5, 7))[..., 2], "select")
        one = random((2, 3, 4, 1)).requires_grad_()
        for function in (lambda x: x.squeeze(3), torch.squeeze, lambda x: x.squeeze((1, 3))):
            ones = shard(one, mesh, placements).requires_grad_()
            got, want = function(ones), function(one)
            assert_replicated(got, want, "squeeze")
            got.sin().sum().backward()
            assert_close(ones.grad.full_tensor(), one.detach().cos(), "gradient of squeeze")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_dims_that_come_and_go(world):
    run_ranks(world, changed_dims, world, timeout=120)


# ---- cat of what lies differently ----


def mixed(world):
    import haloconv

    haloconv.enable_rules()
    mesh, placements = mesh_of((world,)), (Shard(3),)
    x, y = random((2, 3, 4, 7)), random((2, 3, 4, 7), 1)
    whole = shard(y, mesh, (Replicate(),))
    for dim in (0, 1, 2, 3):
        for others, want in [
            ([whole], [y]),
            ([y], [y]),
            ([shard(y, mesh, (Shard(2),))], [y]),
            ([torch.empty(0, dtype=torch.float64), whole], [y]),
            ([shard(y, mesh, placements).to(torch.float32)], [y.float()]),
        ]:
            haloconv.reset_comm_stats()
            got = torch.cat([shard(x, mesh, placements), *others], dim)
            assert_shards(got, torch.cat([x, *want], dim), placements, f"cat {dim}")
            assert "gather" not in haloconv.comm_stats()["by_op"]
            got = torch.cat([*others, shard(x, mesh, placements)], dim)
            assert_close(got.full_tensor(), torch.cat([*want, x], dim), f"cat {dim}")
    got = torch.stack([shard(x, mesh, placements), whole, y], 1)
    assert_shards(got, torch.stack([x, y, y], 1), (Shard(4),), "stack")
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.float16):
        z = (x * 10).to(dtype)
        zs = shard(z, mesh, placements)
        assert_shards(torch.cat([zs, zs], 3), torch.cat([z, z], 3), placements, "cat", 0, 0)
        assert_shards(zs[..., 1::2].flip(3), z[..., 1::2].flip(3), placements, "flip", 0, 0)
        assert_shards(zs.roll(2, 3), z.roll(2, 3), placements, "roll", 0, 0)
    with torch.inference_mode():
        got = torch.cat(shard(x, mesh, placements).chunk(2, 3)[::-1], 3)
        assert_shards(got, torch.cat(x.chunk(2, 3)[::-1], 3), placements, "inference mode")


@pytest.mark.parametrize("world", [2, 3])
def test_cat_of_mixed_inputs(world):
    run_ranks(world, mixed, world)


# ---- one graph, traffic ----


def compiled(world):
    import haloconv

    haloconv.enable_rules()

    def function(x):
        left, right = x.chunk(2, 3)
        x = torch.cat([right[..., 1:], left, x.flip(3)], 3).roll(3, 3)
        x = x[..., 1:-1:2] * x[..., 2::2].select(2, 1).unsqueeze(2)
        return F.pixel_shuffle(x, 2) + x[..., 3:4].sum()

    torch._dynamo.reset()
    traced = torch.compile(function, fullgraph=True, backend="aot_eager")
    check_same(mesh_of((world,)), (Shard(3),), function, random((2, 4, 5, 12)), traced)


@pytest.mark.parametrize("world", [2, 3])
def test_compiles_as_one_graph(world):
    run_ranks(world, compiled, world, timeout=200)


def traffic(world):
    import haloconv

    haloconv.enable_rules()
    x = shard(random((2, 4, 8, 40)), mesh_of((world,)), (Shard(3),)).requires_grad_()
    for columns, function in [
        (2 * world, lambda x: x[..., 1:] - x[..., :-1]),
        (2, lambda x: x[..., 13:15]),
        (world, lambda x: x[..., 5]),
        (world, lambda x: x.roll(1, 3)),
        (0, lambda x: torch.cat([x, x], 1)),
    ]:
        haloconv.reset_comm_stats()
        function(x).sin().sum().backward()
        stats = haloconv.comm_stats()
        assert "gather" not in stats["by_op"], stats
        assert stats["bytes"] <= 2 * columns * 2 * 4 * 8 * 8 + 100, (columns, stats)


def test_sends_columns_only():
    run_ranks(4, traffic, 4)


# ---- writes that would be lost ----


def into_slice(x):
    x[..., :3] = 0


def into_kept_slice(x):
    y = x[..., 1:]
    y.relu_()


def into_view_of_slice(x):
    x[..., 1:].transpose(1, 2).unsqueeze(0).add_(1)


def into_column(x):
    x[..., 2].fill_(1)


def into_part(x):
    x.split(2, 3)[0].mul_(2)


def into_out(x):
    torch.neg(x[..., 1:], out=x[..., :-1])


def into_original(x):
    y = x[..., 1:]
    x.add_(1)
    return y


def into_detached(x):
    y = x.detach()[..., 1:]
    x.detach().clamp_(min=0)
    return y


def into_windows(x):
    x.unfold(3, 2, 2).zero_()


def lost(function, mode):
    import haloconv

    haloconv.enable_rules()
    x = shard(random((2, 3, 4, 7)), mesh_of((2,)), (Shard(3),))
    with getattr(torch, mode)():
        function(x * 1)


@pytest.mark.parametrize("mode", ["no_grad", "enable_grad", "inference_mode"])
@pytest.mark.parametrize(
    "function",
    [
        into_slice,
        into_kept_slice,
        into_view_of_slice,
        into_column,
        into_part,
        into_out,
        into_original,
        into_detached,
        into_windows,
    ],
)
def test_a_write_that_would_be_lost_raises(function, mode):
    raises_on_every_rank(
        2, lost, function, mode, kinds=("RuntimeError",), match="in torch the write would show"
    )


def kept(world):
    import haloconv

    haloconv.enable_rules()
    mesh, placements = mesh_of((world,)), (Shard(3),)
    plain = random((2, 3, 4, 7))
    for x in (plain.clone(), shard(plain, mesh, placements)):
        y = x[..., 1:].clone()
        y.relu_()
        y.add_(y.detach().clone())
        y.mul_(2).sub_(torch.ones_like(y))
        y[:, 1] = 3  # not a sharded dim
        y[:, :, ::2].zero_()
        x.relu_()  # no slice of it is left
        x.copy_(x * 2)
        z = x[..., :-1]
        del z
        x.clamp_(max=1)
        w = torch.relu(x)[..., 2:] + 1
        F.hardtanh(w, 0, 2, inplace=True)
        if x.__class__ is torch.Tensor:
            want = x, y, w
    for a, b in zip((x, y, w), want):
        assert_shards(a, b, placements, "in place")
    # gradients that are slices accumulate
    leaf, other = (shard(plain, mesh, placements).requires_grad_() for _ in range(2))
    for _ in range(2):
        torch.cat([leaf, other], 3).sum().backward()
    leaf.grad.mul_(0.5)
    assert_shards(leaf.grad, torch.ones_like(plain), placements, "accumulated")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_other_writes_work(world):
    run_ranks(world, kept, world)


# ---- errors ----


def bad(function):
    import haloconv

    haloconv.enable_rules()
    function(shard(random((2, 4, 6, 7)), mesh_of((2,)), (Shard(3),)))


def wrong_sizes(x):
    torch.cat([x, x[:, 1:]], 3)


def wrong_split(x):
    x.split([3, 3], 3)


def wrong_index(x):
    x.select(3, 7)


def wrong_flip(x):
    x.flip(3, 3)


def wrong_shuffle(x):
    F.pixel_shuffle(x, 3)


def wrong_unshuffle(x):
    F.pixel_unshuffle(x, 2)


def wrong_source(x):
    torch.slice_scatter(x, x[..., 1:], 3, 0, 2)


@pytest.mark.parametrize(
    "function, match",
    [
        (wrong_sizes, "tensors have shapes"),
        (wrong_split, "split_sizes is"),
        (wrong_index, "index in dim 3 is 7"),
        (wrong_flip, "each|multiple times"),
        (wrong_shuffle, "upscale_factor is 3|divisible"),
        (wrong_unshuffle, "downscale_factor is 2"),
        (wrong_source, "src has shape"),
    ],
)
def test_bad_arguments(function, match):
    kinds = ("ValueError", "TypeError", "IndexError", "RuntimeError")
    raises_on_every_rank(2, bad, function, kinds=kinds, match=match)


def flattened(x):
    x.roll(1)


def every_column(x):
    x.unbind(3)


def picked(x):
    index = torch.tensor([0, 2])
    x.index_select(3, shard(index, x.device_mesh, (Replicate(),)))


@pytest.mark.parametrize("function", [flattened, every_column, picked])
def test_without_a_sharded_form(function):
    raises_on_every_rank(2, bad, function, kinds=("RuntimeError",), match="has no sharded form")
