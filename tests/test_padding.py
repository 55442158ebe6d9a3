"""Padding of sharded tensors against unsplit ones: every mode, uneven and empty shards, gradients."""

import copy
import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import assert_shards, check_same, mesh_of, raises_on_every_rank, run_ranks, shard
from rulecase import check, random
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.core

SHAPES = [(2, 3, 5, 7), (2, 1, 13, 3), (1, 1, 3, 4)]


def padded(mode, pad, value=0.0):
    if mode == "constant":
        return functools.partial(F.pad, pad=pad, mode=mode, value=value)
    return functools.partial(F.pad, pad=pad, mode=mode)


def planar_cases():
    for pad, value in [
        ((1, 1, 1, 1), 0.0),
        ((2, 0, 0, 3), 1.5),
        ((0, 5), -2.25),
        ((-1, 1, 1, -1), 0.5),
        ((-1, -1), 0.0),
        ((9, 11, 8, 0), 1.0),
        ((0, 0, 1, -2, 1, 0, 0, 1), 3.0),
        ((-3, 4), 7.0),
        ((0, 0), 1.0),
        ((0, 0, -2, 0), 0.0),
    ]:
        yield f"constant {pad} {value}", padded("constant", pad, value), SHAPES
    for pad in [(1, 1, 1, 1), (2, 0, 0, 2), (0, 2, 1, 0), (-1, 2, 2, -1), (0, 0, 0, 0), (2, 2, 0, 0)]:
        yield f"reflect {pad}", padded("reflect", pad), SHAPES
        yield f"circular {pad}", padded("circular", pad), SHAPES
    for pad in [(1, 1, 1, 1), (7, 0, 0, 9), (0, 5, 2, 0), (-1, 2, 3, -1), (-1, -1, 0, 0)]:
        yield f"replicate {pad}", padded("replicate", pad), [*SHAPES, (1, 1, 1, 4), (2, 1, 2, 5)]


def other_cases():
    for mode in ("reflect", "replicate", "circular", "constant"):
        yield f"3-d {mode}", padded(mode, (1, 2, 0, 1, 1, 1)), [(2, 2, 3, 5, 3), (1, 1, 4, 7, 6)]
        yield f"unbatched 3-d {mode}", padded(mode, (1, 2, 0, 1, 1, 1)), [(2, 3, 5, 3)]
        yield f"1-d {mode}", padded(mode, (2, 1)), [(2, 2, 7), (1, 1, 3)]
    yield "reflect 2-d without batch", padded("reflect", (1, 1, 2, 1)), [(2, 5, 7)]
    yield "empty batch", padded("constant", (1, 1)), [(0, 2, 5, 7)]


def grid(world, cases):
    import haloconv

    haloconv.enable_rules()
    cases = list(cases())
    return check(world, cases, (False,)) + check(world, cases[::5], (True,))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_planar(world):
    assert run_ranks(world, grid, world, planar_cases, timeout=120)[0] > 0


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_lines_and_volumes(world):
    assert run_ranks(world, grid, world, other_cases, timeout=120)[0] > 0


# ---- dtypes, other routes ----


def dtypes(world):
    import haloconv

    haloconv.enable_rules()
    mesh, placements = mesh_of((world,)), (Shard(3),)
    for dtype, value in [
        (torch.int64, 2**53 + 1),
        (torch.int64, -(2**62) - 1),
        (torch.int32, 7),
        (torch.uint8, 255),
        (torch.bool, True),
        (torch.bool, False),
        (torch.float32, 0.1),
        (torch.float16, 0.1),
        (torch.bfloat16, float("-inf")),
        (torch.complex128, 1 + 2j),
    ]:
        x = torch.arange(2 * 1 * 3 * 7).reshape(2, 1, 3, 7).to(dtype)
        for pad in ((2, 1), (-1, 3, 1, 1), (8, -4)):
            want = torch.constant_pad_nd(x, pad, value)
            got = torch.constant_pad_nd(shard(x, mesh, placements), pad, value)
            assert_shards(got, want, placements, f"{dtype} {value} {pad}", 0, 0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = random((2, 2, 5, 7)).to(dtype)
        for mode in ("reflect", "replicate", "circular"):
            want, got = (F.pad(t, (2, 1, 1, 2), mode=mode) for t in (x, shard(x, mesh, placements)))
            assert_shards(got, want, placements, f"{dtype} {mode}", 0, 0)


@pytest.mark.parametrize("world", [2, 3])
def test_dtypes_and_values(world):
    run_ranks(world, dtypes, world)


def without_grad(world):
    import haloconv

    mesh, placements = mesh_of((world,)), (Shard(3),)
    x = random((2, 2, 5, 7))
    for manager in (torch.inference_mode, torch.no_grad):
        for mode in ("constant", "reflect", "replicate", "circular"):
            with haloconv.rules(), manager():
                got = F.pad(shard(x, mesh, placements), (2, 1, 1, 2), mode=mode)
                assert_shards(got, F.pad(x, (2, 1, 1, 2), mode=mode), placements, mode)
    with haloconv.rules():
        xs = shard(x, mesh, placements).requires_grad_()
        out = F.pad(xs, (2, 1, 0, 0), mode="reflect") + F.pad(xs, (2, 1), mode="constant")
    out.sum().backward()  # the backward rules stay
    y = x.clone().requires_grad_()
    (F.pad(y, (2, 1, 0, 0), mode="reflect") + F.pad(y, (2, 1), mode="constant")).sum().backward()
    assert_shards(xs.grad, y.grad, placements, "backward after the rules were switched off")


def test_without_grad_and_after_the_rules():
    run_ranks(2, without_grad, 2)


def compiled(world):
    import haloconv

    haloconv.enable_rules()
    mesh = mesh_of((world,))

    def function(x):
        x = F.pad(F.pad(x, (1, 2, 1, 0), mode="reflect"), (0, 1, 0, 0), mode="replicate")
        return F.pad(F.pad(x, (-1, 3), value=2.0), (1, 1, 2, 0), mode="circular").sin()

    torch._dynamo.reset()
    traced = torch.compile(function, fullgraph=True, backend="aot_eager")
    check_same(mesh, (Shard(3),), function, random((2, 2, 5, 7)), traced)


@pytest.mark.parametrize("world", [2, 3])
def test_compiles_as_one_graph(world):
    run_ranks(world, compiled, world, timeout=200)


def layers(world, rules, compile):
    import haloconv

    if rules:
        haloconv.enable_rules()
    mesh = mesh_of((world,))
    torch.manual_seed(0)
    for mode in ("reflect", "replicate", "circular"):
        plain = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), nn.Conv2d(3, 2, 5, 2, 2, padding_mode=mode)
        ).double()
        sharded = haloconv.parallelize(copy.deepcopy(plain), mesh)
        if compile:
            torch._dynamo.reset()
            sharded = torch.compile(sharded, fullgraph=True, backend="aot_eager")
        others = dict(sharded.named_parameters())
        params = {
            name: (p, others.get(name, others.get("_orig_mod." + name)))
            for name, p in plain.named_parameters()
        }
        for shape in [(2, 2, 6, 11), (1, 2, 7, 8)][: 1 if compile else 2]:
            plain.zero_grad()
            sharded.zero_grad()
            check_same(mesh, (Shard(3),), plain, random(shape), sharded, params=params)


@pytest.mark.parametrize("world, rules, compile", [(2, False, False), (3, True, False), (2, True, True)])
def test_padding_mode_of_a_convolution(world, rules, compile):
    run_ranks(world, layers, world, rules, compile, timeout=200)


# ---- traffic, errors, plain tensors ----


def traffic(world):
    import haloconv

    haloconv.enable_rules()
    x = shard(random((2, 4, 8, 40)), mesh_of((world,)), (Shard(3),)).requires_grad_()
    for mode in ("constant", "reflect", "replicate", "circular"):
        haloconv.reset_comm_stats()
        F.pad(x, (1, 1, 0, 0), mode=mode).sin().sum().backward()
        stats = haloconv.comm_stats()
        columns = stats["bytes"] / (2 * 4 * 8 * 8)
        assert "gather" not in stats["by_op"] and columns <= 6 * world, (mode, columns, stats)


def test_sends_columns_only():
    run_ranks(4, traffic, 4)


def bad(mode, pad, shape):
    import haloconv

    haloconv.enable_rules()
    F.pad(shard(random(shape), mesh_of((2,)), (Shard(len(shape) - 1),)), pad, mode=mode)


@pytest.mark.parametrize(
    "mode, pad, shape, match",
    [
        ("reflect", (7, 0), (1, 2, 7), "less than its size 7"),
        ("reflect", (0, 0, 5, 0), (1, 2, 5, 7), "less than its size 5"),
        ("constant", (-4, -4), (1, 2, 7), r"pad is \(-4, -4\)"),
        ("replicate", (-4, -3), (1, 2, 7), r"pad is \(-4, -3\)"),
        ("circular", (8, 0), (1, 2, 7), "once around"),
    ],
)
def test_bad_arguments(mode, pad, shape, match):
    raises_on_every_rank(2, bad, mode, pad, shape, match=match)


@pytest.mark.parametrize("compile", [False, True])
def test_plain_tensors_are_padded_as_ever(compile):
    import haloconv  # noqa: F401

    x = random((2, 3, 6, 7)).requires_grad_()

    def function(x):
        return F.pad(x, (2, 1, 0, 3), mode="circular").sin()

    out = (torch.compile(function, fullgraph=True, backend="aot_eager") if compile else function)(x)
    y = x.detach().clone().requires_grad_()
    want = torch.cat([y[..., -2:], y, y[..., :1]], 3)
    want = torch.cat([want, want[:, :, :3]], 2).sin()
    out.sum().backward()
    want.sum().backward()
    assert torch.equal(out, want) and torch.allclose(x.grad, y.grad)
    with torch.inference_mode():
        assert torch.equal(function(x), want)
