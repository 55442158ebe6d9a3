"""The named faults from number 16 on: see test_cases.py."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from convcase import Block, grid, pairs, run
from harness import assert_close, assert_shards, check_same, full, mesh_of, run_ranks, shard

pytestmark = pytest.mark.core

W, H = (3,), (2,)


# ------------------------------------------------------------------------------------------------ 16, 17, 18


def reused_buffers(world, rounds):
    """Convolutions one after the other with buffers freed and overwritten at once; every value is
    predictable."""
    import haloconv
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = mesh_of((world,))
    rank = dist.get_rank()
    weight = distribute_tensor(torch.ones(1, 1, 1, 3, dtype=torch.float64), mesh)
    width = 8 * world
    with haloconv.rules():
        for i in range(rounds):
            local = torch.full((1, 1, 64, 8), float(1000 * i + rank), dtype=torch.float64)
            xs = DTensor.from_local(
                local,
                mesh,
                [Shard(3)],
                run_check=False,
                shape=(1, 1, 64, width),
                stride=(64 * width,) * 2 + (width, 1),
            )
            out = F.conv2d(xs, weight, padding=(0, 1)).to_local()
            local.fill_(-1e9)
            del local, xs
            junk = [torch.full((64,), -1e9, dtype=torch.float64) for _ in range(4)]
            left = 1000 * i + rank - 1 if rank > 0 else 0
            right = 1000 * i + rank + 1 if rank < world - 1 else 0
            assert out[0, 0, :, 0].eq(left + 2 * (1000 * i + rank)).all(), (i, out[0, 0, :2])
            assert out[0, 0, :, -1].eq(right + 2 * (1000 * i + rank)).all(), (i, out[0, 0, :2])
            del junk, out


@pytest.mark.parametrize("world", [2, 4])
def test_case_16_no_buffer_is_reused_under_a_message(world):
    """Fails when a send isn't waited for and its memory is used again: random wrong halos."""
    run_ranks(world, reused_buffers, world, 300)


def counted(world, sizes, kernel, stride, padding):
    """Messages and bytes of one forward and of its backward on this rank, beside what the plans say."""
    import haloconv
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of((world,))
    rank = dist.get_rank()
    x = torch.randn(2, 3, *sizes, dtype=torch.float64)
    xs = shard(x, mesh, (Shard(3),)).requires_grad_()
    weight = distribute_tensor(torch.randn(4, 3, 1, kernel, dtype=torch.float64), mesh)
    plan = haloconv.plan(sizes[1], world, kernel, stride, padding)
    spare = sizes[1] - ((plan.out_size - 1) * stride - 2 * padding + kernel)
    back = haloconv.plan(plan.out_size, world, kernel, stride, padding, transposed=True, output_padding=spare)
    with haloconv.rules():
        haloconv.reset_comm_stats()
        out = F.conv2d(xs, weight, stride=(1, stride), padding=(0, padding))
        forward = haloconv.comm_stats()
        grad = shard(torch.randn(out.shape, dtype=torch.float64), mesh, (Shard(3),))
        haloconv.reset_comm_stats()
        out.backward(grad)
        backward = haloconv.comm_stats()
    want = []
    for p, channels in ((plan, 3), (back, 4)):
        sends = p.ranks[rank].sends
        want.append((len(sends), sum(e - b for _, b, e in sends) * 2 * channels * sizes[0] * 8))
    return [(forward["messages"], forward["bytes"]), (backward["messages"], backward["bytes"])], want


@pytest.mark.parametrize(
    "world, size, kernel, stride, padding",
    [(4, 5, 3, 1, 1), (4, 9, 3, 2, 1), (3, 1, 3, 1, 1), (4, 16, 4, 4, 0), (4, 7, 7, 1, 3), (2, 9, 2, 3, 0)],
)
def test_case_17_no_empty_messages(world, size, kernel, stride, padding):
    """Fails when ranks with nothing to say exchange empty messages, or more than the plan's segments."""
    for got, want in run_ranks(world, counted, world, (3, size), kernel, stride, padding):
        assert got == want


def world_of_one():
    import copy

    import haloconv
    from torch.distributed.tensor import Shard

    mesh = mesh_of((1,))
    torch.manual_seed(0)
    plain = Block().double()
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh)
    haloconv.reset_comm_stats()
    check_same(
        mesh,
        (Shard(3),),
        plain,
        torch.randn(1, 3, 16, 32, dtype=torch.float64),
        sharded,
        params=pairs(plain, sharded),
    )
    stats = haloconv.comm_stats()
    return stats["messages"], stats["bytes"]


def test_case_18_one_process():
    """Fails when the distributed path doesn't work in a world of one, or sends something there."""
    assert run_ranks(1, world_of_one) == [(0, 0)]


# ------------------------------------------------------------------------------------------------ 19


def masks(world, bias, x_grad, w_grad, b_grad, route):
    """Only what requires a gradient gets one, and it is right."""
    import copy

    import haloconv
    from torch.distributed.tensor import Shard, distribute_module

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    plain = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=bias, dtype=torch.float64)
    plain.weight.requires_grad_(w_grad)
    if bias:
        plain.bias.requires_grad_(b_grad)
    x = torch.randn(2, 2, 5, 9, dtype=torch.float64)
    copied = copy.deepcopy(plain)
    with haloconv.rules():
        sharded = distribute_module(copied, mesh) if route == "rules" else haloconv.parallelize(copied, mesh)
        for name, p in plain.named_parameters():
            assert dict(sharded.named_parameters())[name].requires_grad == p.requires_grad
        check_same(
            mesh, (Shard(3),), plain, x, sharded, check_input_grad=x_grad, params=pairs(plain, sharded)
        )


@pytest.mark.parametrize("route", ["rules", "parallelize"])
@pytest.mark.parametrize(
    "bias, x_grad, w_grad, b_grad",
    [
        (False, True, True, False),
        (False, False, True, False),
        (True, False, False, True),
        (True, True, False, False),
        (True, False, True, True),
    ],
)
def test_case_19_output_mask(bias, x_grad, w_grad, b_grad, route):
    """Fails when no bias, an input without gradient, or only one wanted gradient is an error, or gives a
    gradient nobody asked for."""
    run_ranks(3, masks, 3, bias, x_grad, w_grad, b_grad, route)


def double_backward(world, route):
    """Right, or one clear error on every rank: a gradient penalty."""
    import copy

    import haloconv
    from torch.distributed.tensor import Shard, distribute_module

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, stride=2, padding=1)
    ).double()
    x = torch.randn(1, 2, 5, 9, dtype=torch.float64).requires_grad_()

    def penalty(model, inputs):
        (grad,) = torch.autograd.grad((model(inputs) ** 2).sum(), inputs, create_graph=True)
        return (grad**2).sum()

    copied = copy.deepcopy(plain)
    penalty(plain, x).backward()
    with haloconv.rules():
        sharded = distribute_module(copied, mesh) if route == "rules" else haloconv.parallelize(copied, mesh)
        xs = shard(x, mesh, (Shard(3),)).requires_grad_()
        try:
            value = penalty(sharded, xs)
            value.backward()
        except (RuntimeError, ValueError) as error:
            assert "double" in str(error).lower() or "twice" in str(error) or "second" in str(error), error
            return f"refused: {error}"
    assert_close(full(value), penalty(plain, x).detach(), "gradient penalty")
    assert_shards(xs.grad, x.grad, (Shard(3),), "input gradient of the penalty")
    for name, (p, s) in pairs(plain, sharded).items():
        if p.grad is not None:
            assert_close(full(s.grad), p.grad, f"gradient of {name}")
    return "right"


@pytest.mark.parametrize("route", ["rules", "parallelize"])
def test_case_19_double_backward_is_right_or_refused(route):
    """Fails when a gradient of a gradient is silently wrong, or when only some ranks refuse it."""
    assert len({result.split(":")[0] for result in run_ranks(2, double_backward, 2, route)}) == 1


# ------------------------------------------------------------------------------------------------ 20


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("route", ["rules", "parallelize", "layer"])
def test_case_20_one_and_three_dims(world, route):
    """Fails when four dims are assumed somewhere."""
    run(grid((11,), 3, 1, 2, 1, (world,), route=route))
    run(grid((4, 5, 6), 3, 1, 1, 1, (world,), (4,), route=route, channels_last=True))
    run(grid((4, 5, 6), 3, 1, 2, 1, (world,), (2,), route=route))


@pytest.mark.parametrize("k, s, p, op", [(4, 2, 1, 0), (3, 2, 1, 1), (2, 2, 0, 0)])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_case_20_transposed(k, s, p, op, world):
    """Fails when an upsampling convolution's output, which two ranks' inputs touch, lacks one of them."""
    for route in ("rules", "parallelize", "layer"):
        run(grid((3, 7), k, p, s, 1, (world,), W, transposed=True, output_padding=op, route=route))
        run(grid((5,), k, p, s, 1, (world,), (2,), transposed=True, output_padding=op, route=route))


def output_size_argument(world):
    import copy

    import haloconv
    from torch.distributed.tensor import Shard

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    plain = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, dtype=torch.float64)
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh)
    x = torch.randn(1, 2, 4, 7, dtype=torch.float64)
    check_same(
        mesh,
        (Shard(3),),
        lambda t: plain(t, output_size=(8, 14)),
        x,
        lambda t: sharded(t, output_size=(8, 14)),
        params=pairs(plain, sharded),
    )


def test_case_20_output_size_argument():
    """Fails when ConvTranspose's output_size is read from the local strip."""
    run_ranks(3, output_size_argument, 3)


# ------------------------------------------------------------------------------------------------ 21


def compiled(world):
    import copy

    import haloconv
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    ws = distribute_tensor(weight.detach(), mesh).requires_grad_()
    haloconv.enable_rules()
    function = torch.compile(lambda t: F.conv2d(t, ws, padding=1), fullgraph=True, backend="aot_eager")
    for width in (12, 16, 20):
        weight.grad = ws.grad = None
        x = torch.randn(1, 2, 4, width, dtype=torch.float64)
        check_same(
            mesh,
            (Shard(3),),
            lambda t: F.conv2d(t, weight, padding=1),
            x,
            function,
            params={"weight": (weight, ws)},
        )
    plain = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh)
    layer = torch.compile(sharded, fullgraph=True, backend="aot_eager")
    check_same(mesh, (Shard(3),), plain, x, layer, params=pairs(plain, sharded))


def test_case_21_compile():
    """Fails when F.conv2d on a DTensor, or a layer, doesn't compile as one graph. More in test_compile.py."""
    run_ranks(2, compiled, 2, timeout=180)


# ------------------------------------------------------------------------------------------------ 23


@pytest.mark.parametrize("route", ["rules", "parallelize", "layer"])
@pytest.mark.parametrize("channels, groups", [((4, 4), 4), ((4, 8), 4), ((4, 6), 2), ((6, 3), 3)])
def test_case_23_groups_and_bias(channels, groups, route):
    """Fails when groups or depthwise convolutions with bias are wrong on a spatially sharded input."""
    run(grid((4, 9), 3, 1, 1, 1, (3,), W, channels=channels, groups=groups, route=route, batch=2))
    run(
        grid(
            (4, 9),
            3,
            1,
            2,
            1,
            (3,),
            W,
            channels=channels,
            groups=groups,
            route=route,
            transposed=True,
            output_padding=1,
        )
    )


def channel_sharded(layout, x_shards, w_shards, bias, may_refuse):
    import haloconv
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(layout)

    def placements(dims):
        return tuple(Replicate() if d is None else Shard(d) for d in dims)

    torch.manual_seed(0)
    weight = torch.randn(8, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(8, dtype=torch.float64, requires_grad=True) if bias else None
    x = torch.randn(2, 8, 5, 9, dtype=torch.float64)
    ws = shard(weight, mesh, placements(w_shards)).requires_grad_()
    bs = (
        shard(b, mesh, placements([d if d == 0 else None for d in w_shards])).requires_grad_()
        if bias
        else None
    )
    params = {"weight": (weight, ws)} | ({"bias": (b, bs)} if bias else {})
    with haloconv.rules():
        try:
            check_same(
                mesh,
                placements(x_shards),
                lambda t: F.conv2d(t, weight, b, padding=1, groups=8),
                x,
                lambda t: F.conv2d(t, ws, bs, padding=1, groups=8),
                params=params,
            )
        except (ValueError, RuntimeError) as error:
            if not may_refuse or isinstance(error, AssertionError):
                raise
            assert "weight" in str(error) or "channel" in str(error), error
            return f"refused: {error}"
    return "right"


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_case_23_channel_sharded_depthwise(bias):
    """Fails when a depthwise convolution whose channels (input and weight) are sharded is wrong."""
    assert set(run_ranks(2, channel_sharded, (2,), (1,), (0,), bias, False)) == {"right"}
    assert set(run_ranks(4, channel_sharded, (4,), (1,), (0,), bias, False)) == {"right"}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "layout, x_shards, w_shards",
    [
        ((2, 2), (1, 3), (0, None)),
        ((2, 2), (3, 1), (None, 0)),
        ((2,), (3,), (0,)),
        ((2,), (3,), (2,)),
        ((2,), (1,), (None,)),
    ],
    ids=str,
)
def test_case_23_mixed_shardings_are_right_or_refused(layout, x_shards, w_shards, bias):
    """Fails when a sharded weight beside a sharded input gives a wrong value instead of the right one or a
    clear error."""
    world = 4 if len(layout) == 2 else 2
    results = run_ranks(world, channel_sharded, layout, x_shards, w_shards, bias, True)
    assert len({result.split(":")[0] for result in results}) == 1


# ------------------------------------------------------------------------------------------------ 24


def autocast(world, dtype, channels_last, route):
    import copy

    import haloconv
    from torch.distributed.tensor import Shard, distribute_module

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.ConvTranspose2d(8, 4, 2, 2)
    )
    exact = copy.deepcopy(plain).double()
    x = torch.randn(2, 3, 6, 14)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    exact_x = x.double().requires_grad_()
    (exact(exact_x) ** 2).mean().backward()
    copied = copy.deepcopy(plain)
    with haloconv.rules():
        sharded = distribute_module(copied, mesh) if route == "rules" else haloconv.parallelize(copied, mesh)
        xs = shard(x, mesh, (Shard(3),)).requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            out = sharded(xs)
        assert out.dtype == dtype and out.placements == (Shard(3),)
        if channels_last and out.to_local().numel():
            assert out.to_local().is_contiguous(memory_format=torch.channels_last)
        (out.float() ** 2).mean().backward()
    # 16-bit arithmetic: 8 bits of mantissa (bf16) over three layers; the error is taken relative to the
    # largest value
    pairs_ = [(out.full_tensor().double(), exact(exact_x)), (xs.grad.full_tensor().double(), exact_x.grad)]
    pairs_ += [(full(s.grad).double(), p.grad) for p, s in pairs(exact, sharded).values()]
    for got, want in pairs_:
        assert (got - want).abs().max() <= 0.04 * want.abs().max(), (
            got - want
        ).abs().max() / want.abs().max()


@pytest.mark.parametrize("route", ["rules", "parallelize"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_case_24_autocast(dtype, channels_last, route):
    """Fails when autocast doesn't reach the sharded convolution, or when the memory format is lost."""
    run_ranks(2, autocast, 2, dtype, channels_last, route)


@pytest.mark.parametrize("route", ["rules", "parallelize", "layer"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_case_24_channels_last_is_kept(world, route):
    """Fails when the exchange turns channels_last activations into contiguous ones: every following layer is
    slower."""
    run(grid((6, 10), 3, 1, 1, 1, (world,), W, channels=(4, 8), channels_last=True, batch=2, route=route))
    run(
        grid(
            (6, 10),
            7,
            3,
            1,
            1,
            (world,),
            W,
            channels=(8, 8),
            groups=8,
            channels_last=True,
            batch=2,
            route=route,
        )
    )
    run(
        grid((4, 4, 6), 3, 1, 1, 1, (world,), (4,), channels=(4, 8), channels_last=True, batch=2, route=route)
    )
    run(
        grid(
            (6, 5),
            2,
            0,
            2,
            1,
            (world,),
            W,
            channels=(4, 8),
            channels_last=True,
            transposed=True,
            output_padding=0,
            route=route,
        )
    )


def dtypes(world, dtype):
    """Every floating dtype, forward and backward, at its own precision."""
    import haloconv
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    x = torch.randn(2, 2, 5, 12).to(dtype)
    weight = torch.randn(3, 2, 3, 3).to(dtype)
    exact_x, exact_w = x.double().requires_grad_(), weight.double().requires_grad_()
    want = F.conv2d(exact_x, exact_w, padding=1)
    want.sum().backward()
    xs = shard(x, mesh, (Shard(3),)).requires_grad_()
    ws = distribute_tensor(weight, mesh).requires_grad_()
    with haloconv.rules():
        out = F.conv2d(xs, ws, padding=1)
        out.backward(shard(torch.ones(out.shape, dtype=dtype), mesh, (Shard(3),)))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.005, torch.float64: 1e-12}[dtype]
    for got, wanted in [(out, want), (xs.grad, exact_x.grad), (ws.grad, exact_w.grad)]:
        assert got.dtype == dtype
        assert (got.full_tensor().double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_case_24_every_floating_dtype(dtype):
    """Fails when a dtype isn't exchanged as it is."""
    run_ranks(3, dtypes, 3, dtype)
    gc.collect()
