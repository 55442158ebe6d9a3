"""Reductions, norms and softmax over sharded dims: values, gradients and placements against the unsplit op."""

import math

import pytest
import torch
import torch.nn.functional as F
from harness import assert_close, mesh_of, raises_on_every_rank, run_ranks, shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.core

DIMS = [None, 3, (2, 3), (-1,), (0, 2, 3), (1, 3), 1, (-2, 1)]

# name -> (function of x and a value of dim, whether it is a function of one dim or all only)
OF_DIMS = {
    "sum": lambda x, dim, keep: x.sum(dim, keepdim=keep),
    "mean": lambda x, dim, keep: x.mean(dim, keepdim=keep),
    "nansum": lambda x, dim, keep: x.nansum(dim, keepdim=keep),
    "var": lambda x, dim, keep: x.var(dim, keepdim=keep),
    "var of correction 0": lambda x, dim, keep: x.var(dim, correction=0, keepdim=keep),
    "std": lambda x, dim, keep: x.std(dim, correction=2, keepdim=keep),
    "var_mean": lambda x, dim, keep: torch.var_mean(x, dim, correction=0.5, keepdim=keep),
    "std_mean": lambda x, dim, keep: torch.std_mean(x, dim, correction=0, keepdim=keep),
    "amax": lambda x, dim, keep: x.amax(() if dim is None else dim, keepdim=keep),
    "amin": lambda x, dim, keep: x.amin(() if dim is None else dim, keepdim=keep),
    "any": lambda x, dim, keep: (x > 1.5).any(dim, keepdim=keep),
    "all": lambda x, dim, keep: (x < 1.5).all(dim, keepdim=keep),
    "logsumexp": lambda x, dim, keep: x.logsumexp((0, 1, 2, 3) if dim is None else dim, keepdim=keep),
    "norm inf": lambda x, dim, keep: torch.linalg.vector_norm(x, math.inf, dim, keep),
    "norm -inf": lambda x, dim, keep: torch.linalg.vector_norm(x, -math.inf, dim, keep),
    "norm 0": lambda x, dim, keep: torch.linalg.vector_norm(x, 0, dim, keep),
    "norm 1": lambda x, dim, keep: torch.linalg.vector_norm(x, 1, dim, keep),
    "norm 2": lambda x, dim, keep: torch.linalg.vector_norm(x, 2, dim, keep),
    "norm 3.5": lambda x, dim, keep: torch.linalg.vector_norm(x, 3.5, dim, keep),
    "norm -1": lambda x, dim, keep: torch.linalg.vector_norm(x, -1, dim, keep),
    "torch.norm": lambda x, dim, keep: torch.norm(x, 2, dim, keep),
    "count_nonzero": lambda x, dim, keep: torch.count_nonzero(x > 0.3, dim),
}
OF_ONE = {
    "max": lambda x, dim, keep: x.max() if dim is None else x.max(dim, keep),
    "min": lambda x, dim, keep: x.min() if dim is None else x.min(dim, keep),
    "argmax": lambda x, dim, keep: x.argmax(dim, keep),
    "argmin": lambda x, dim, keep: x.argmin(dim, keep),
    "aminmax": lambda x, dim, keep: torch.aminmax(x, dim=dim, keepdim=keep),
    "aten.norm": lambda x, dim, keep: (
        torch.ops.aten.norm.Scalar(x, 2)
        if dim is None
        else torch.ops.aten.norm.ScalarOpt_dim(x, None, [dim], keep)
    ),
}
OF_A_DIM = {
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "softmin": lambda x, dim: F.softmin(x, dim),
}


def images(*sizes, seed=0, dtype=torch.float64):
    return torch.randn(sizes, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def expected_placements(x, placements, dims, keepdim):
    """Where a reduction over dims leaves the shards."""
    dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    dims = {dim % x.dim() for dim in dims}
    result = []
    for placement in placements:
        if placement.is_replicate() or placement.dim in dims:
            result.append(Replicate())
        else:
            result.append(
                Shard(
                    placement.dim if keepdim else placement.dim - len([d for d in dims if d < placement.dim])
                )
            )
    return tuple(result)


def compare(function, x, mesh, placements, what, out_placements=None, with_gradient=True):
    """Values, placements and the gradient with respect to x."""
    x = x.detach().clone()
    with_gradient = with_gradient and x.is_floating_point()
    xs = shard(x, mesh, placements).requires_grad_(with_gradient)
    x.requires_grad_(with_gradient)
    wants, gots = as_tuple(function(x)), as_tuple(function(xs))
    assert len(wants) == len(gots), what
    grads, sharded_grads = [], []
    for number, (want, got) in enumerate(zip(wants, gots)):
        assert isinstance(got, DTensor), f"{what}: output {number} is a {type(got).__name__}"
        assert not any(p.is_partial() for p in got.placements), f"{what}: {got.placements}"
        if out_placements is not None:
            assert tuple(got.placements) == tuple(out_placements), (
                f"{what}: {got.placements}, {out_placements}"
            )
        assert got.shape == want.shape, f"{what}: {got.shape}"
        whole = got.detach().full_tensor()
        assert whole.dtype == want.dtype, f"{what}: {whole.dtype}, expected {want.dtype}"
        if want.is_floating_point():
            close = torch.allclose(whole, want, rtol=1e-9, atol=1e-9, equal_nan=True)
        else:
            close = torch.equal(whole, want)
        assert close, f"{what}, output {number}:\n{whole}\n{want}"
        if want.requires_grad:
            grads.append(images(*want.shape, seed=number + 1))
            sharded_grads.append(shard(grads[-1], mesh, got.placements))
    if not grads:
        assert not any(got.requires_grad for got in gots), what
        return
    wants = [want for want in wants if want.requires_grad]
    gots = [got for got in gots if got.requires_grad]
    (want,) = torch.autograd.grad(wants, x, grads, allow_unused=True)
    (got,) = torch.autograd.grad(gots, xs, sharded_grads, allow_unused=True)
    if want is None:
        assert got is None, what
        return
    assert tuple(got.placements) == tuple(placements), f"{what}: gradient {got.placements}"
    assert torch.allclose(got.full_tensor(), want, rtol=1e-9, atol=1e-9, equal_nan=True), f"{what}: gradient"


def every_reduction(mesh_shape, dims, sizes):
    import haloconv

    mesh, placements = mesh_of(mesh_shape), tuple(Shard(dim) if dim >= 0 else Replicate() for dim in dims)
    x = images(*sizes)
    # torch's elementwise ops gather an input whose sharded dim has size 1 where another is broadcast beside it.
    with_gradient = all(sizes[dim] > 1 for dim in dims)
    number = 0
    with haloconv.rules():
        for name, function in {**OF_DIMS, **OF_ONE}.items():
            for dim in DIMS if name in OF_DIMS else [None, 3, -2, 1]:
                number += 1
                keep = number % 2 == 0
                kept = keep and name != "count_nonzero"
                kept = kept and not (dim is None and name in ("max", "min", "aten.norm"))
                compare(
                    lambda t, f=function, d=dim, k=keep: f(t, d, k),
                    x,
                    mesh,
                    placements,
                    f"{name} over {dim}, keepdim {keep}",
                    expected_placements(x, placements, dim, kept),
                    with_gradient,
                )
        for name, function in OF_A_DIM.items():
            for dim in (0, 1, -2, 3):
                compare(
                    lambda t, f=function, d=dim: f(t, d),
                    x,
                    mesh,
                    placements,
                    f"{name} along {dim}",
                    placements,
                )
    return number


LAYOUTS = [
    ((1,), (3,), (2, 3, 4, 5)),
    ((2,), (3,), (2, 3, 4, 7)),
    ((3,), (3,), (2, 3, 4, 4)),
    ((3,), (2,), (2, 3, 7, 5)),
    ((4,), (3,), (2, 2, 3, 5)),
    ((4,), (3,), (1, 2, 3, 1)),
    ((2, 2), (2, 3), (2, 3, 5, 7)),
    ((2, 2), (2, 3), (2, 3, 1, 3)),
    ((2, 2), (0, 3), (3, 2, 4, 5)),
    ((2, 2), (-1, 3), (3, 2, 4, 6)),
]


@pytest.mark.parametrize("mesh_shape, dims, sizes", LAYOUTS)
def test_reductions_equal_unsplit(mesh_shape, dims, sizes):
    """Fails when a value, an index, a gradient or a placement is off."""
    run_ranks(math.prod(mesh_shape), every_reduction, mesh_shape, dims, sizes, timeout=200)


# ---- dtypes, special values, other ranks of tensors ----


def special_values():
    import haloconv

    mesh, placements = mesh_of((3,)), (Shard(1),)
    inf, nan = math.inf, math.nan
    cases = {
        "NaN": [[1, nan, 2, nan], [3, 1, 2, 3], [nan, 1, 1, 1], [1, 2, 3, nan]],
        "ties": [[2, 2, 2, 2], [1, 2, 1, 2], [2, 1, 1, 2], [0, 0, -0.0, 0]],
        "infinities": [
            [-inf, -inf, -inf, -inf],
            [inf, 1, -inf, inf],
            [-inf, 1, 2, -inf],
            [-inf, -inf, 3, -inf],
        ],
    }
    with haloconv.rules():
        for name, rows in cases.items():
            x = torch.tensor(rows, dtype=torch.float64)
            for size in (4, 1):
                part = x[:, :size].contiguous()
                for what, function in {**OF_ONE, **OF_DIMS}.items():
                    if name == "infinities" and what.endswith("_mean"):
                        continue  # unsplit the mean of an infinity is NaN there, though not in mean()
                    if what == "logsumexp" or what.startswith(("norm", "torch.norm", "aten.norm")):
                        dims = (1,)
                    else:
                        dims = (None, 1)
                    for dim in dims:
                        compare(
                            lambda t, f=function, d=dim: f(t, d, False),
                            part,
                            mesh,
                            placements,
                            f"{what} over {dim} of {name}",
                            with_gradient=False,
                        )
                for what, function in OF_A_DIM.items():
                    compare(
                        lambda t, f=function: f(t, 1),
                        part,
                        mesh,
                        placements,
                        f"{what} of {name}",
                        with_gradient=False,
                    )


def test_special_values():
    """Fails when a NaN, an infinity or a tie between ranks is treated in another way than unsplit."""
    run_ranks(3, special_values)


def dtypes():
    import haloconv

    mesh, placements = mesh_of((2,)), (Shard(3),)
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(-9, 9, (2, 3, 4, 5), generator=generator)
    exact = {
        "sum": lambda x: x.sum((2, 3)),
        "sum of all": lambda x: x.sum(),
        "sum in float64": lambda x: x.sum(3, dtype=torch.float64),
        "mean in float64": lambda x: x.mean((1, 3), dtype=torch.float64),
        "prod": lambda x: x.prod(3),
        "prod of all": lambda x: x.prod(),
        "any": lambda x: x.any(3, keepdim=True),
        "all of all": lambda x: x.all(),
        "count": lambda x: x.count_nonzero((1, 3)),
        "amax": lambda x: x.amax((2, 3)),
        "amin": lambda x: x.amin(3),
        "argmax": lambda x: x.to(torch.int64).argmax(),
        "max": lambda x: x.to(torch.int64).max(3),
    }
    with haloconv.rules():
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64):
            x = integers.to(dtype)
            for name, function in exact.items():
                compare(function, x, mesh, placements, f"{name} of {dtype}")
        x = images(2, 3, 40, 50) * 3 + 5
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            half = x.to(dtype)
            sharded = shard(half, mesh, placements)
            for name, function in {
                "sum": lambda x: x.sum((2, 3)),
                "mean": lambda x: x.mean((2, 3)),
                "mean of all": lambda x: x.mean(),
                "var": lambda x: x.var((2, 3)),
                "norm": lambda x: torch.linalg.vector_norm(x, 2, (2, 3)),
                "softmax": lambda x: x.softmax(3),
                "log_softmax": lambda x: x.log_softmax(3),
                "mean in float32": lambda x: x.mean(3, dtype=torch.float32),
            }.items():
                want, got = function(half.double()), function(sharded).full_tensor()
                assert got.dtype == function(half).dtype, (name, dtype)
                unit = torch.finfo(got.dtype).eps
                assert torch.allclose(got.double(), want.double(), rtol=unit * 4, atol=unit * 4), (
                    name,
                    dtype,
                )


def test_dtypes():
    """Fails when a result has another dtype than unsplit, or half precision is summed in half precision."""
    run_ranks(2, dtypes)


def other_ranks_of_tensors():
    import haloconv
    from haloconv._rules import reductions

    reductions._seen.clear()  # what other tests have shown of these shapes
    with haloconv.rules():
        for sizes, dim in [
            ((7,), 0),
            ((3, 7), 1),
            ((2, 3, 7), 2),
            ((2, 3, 4, 5, 7), 4),
            ((2, 3, 7, 5, 2), 2),
        ]:
            mesh, placements = mesh_of((3,)), (Shard(dim),)
            x = images(*sizes)
            for name, function in {
                "sum": lambda x: x.sum(),
                "mean": lambda x: x.mean(),
                "var": lambda x: x.var(),
                "max": lambda x: x.max(),
                "argmin": lambda x: x.argmin(),
                "mean over the last": lambda x: x.mean(-1),
                "norm": lambda x: x.norm(),
                "amax over all": lambda x: x.amax(),
                "std over dim": lambda x, d=dim: x.std(d),
            }.items():
                compare(function, x, mesh, placements, f"{name} of {sizes}")
            if len(sizes) == 5:
                last = x.contiguous(memory_format=torch.channels_last_3d)
                compare(lambda x: x.mean((2, 3, 4), keepdim=True), last, mesh, placements, "channels_last_3d")
        x, y = (images(2, 3, 4, n).contiguous(memory_format=torch.channels_last) for n in (5, 7))
        for name, function in {**OF_DIMS, **OF_ONE}.items():
            compare(
                lambda x, f=function: f(x, 3, True), x, mesh_of((3,)), (Shard(3),), f"{name}, channels_last"
            )
            compare(
                lambda x, f=function: f(x, 1, False), y, mesh_of((3,)), (Shard(2),), f"{name}, channels_last"
            )


def test_other_ranks_of_tensors():
    """Fails when a number of dims or a memory format is not covered."""
    run_ranks(3, other_ranks_of_tensors)


# ---- what is sent, what is kept ----


class _Largest(TorchDispatchMode):
    """The largest tensor that an op makes anew, expanded ones included."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if type(x) is torch.Tensor:
                self.numel = max(self.numel, x.numel())
        return result


def no_full_tensor():
    import haloconv

    mesh, placements = mesh_of((2,)), (Shard(3),)
    x = shard(images(2, 3, 16, 31), mesh, placements).requires_grad_()
    with haloconv.rules():
        for name, function in {
            "mean": lambda x: x.mean((2, 3), keepdim=True),
            "mean over space": lambda x: x.mean((2, 3)),
            "mean of all": lambda x: x.mean(),
            "sum of all": lambda x: x.sum(),
            "var": lambda x: x.var((2, 3)),
            "amax": lambda x: x.amax((2, 3)),
            "mean of products": lambda x: (x * (x - x.mean((2, 3), keepdim=True))).mean((2, 3)),
            "softmax": lambda x: x.softmax(3).amax((2, 3)),
            "norm": lambda x: x.norm(),
            "logsumexp": lambda x: x.logsumexp((2, 3)),
        }.items():
            haloconv.reset_comm_stats()
            with _Largest() as largest:
                out = function(x)
                (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
            assert grad.placements == placements, (name, grad.placements)
            assert largest.numel <= 2 * 3 * 16 * 16, (name, largest.numel)
            stats = haloconv.comm_stats()
            assert "gather" not in stats["by_op"], (name, stats)
            assert 0 < stats["bytes"] <= 16 * 1024, (name, stats)
        haloconv.reset_comm_stats()
        for function in (lambda x: x.mean((1, 2)), lambda x: x.softmax(1), lambda x: x.max(2).values):
            function(x)  # of dims that are whole
        assert haloconv.comm_stats()["messages"] == 0, haloconv.comm_stats()


def test_nothing_is_gathered_and_no_gradient_is_whole():
    """Fails when a rank sends more than the small results, or makes a tensor of the full size, in backward too."""
    run_ranks(2, no_full_tensor)


def ambiguous_shapes():
    import haloconv

    mesh = mesh_of((2,))
    with haloconv.rules():
        a = shard(images(2, 3, 6, 9), mesh, (Shard(3),)).requires_grad_()
        b = shard(images(2, 3, 6, 9), mesh, (Shard(2),)).requires_grad_()
        (a.exp().mean() + b.exp().mean()).backward()
        assert torch.allclose(a.grad.full_tensor(), (images(2, 3, 6, 9).exp() / 324))
        assert torch.allclose(b.grad.full_tensor(), (images(2, 3, 6, 9).exp() / 324))
        x = shard(images(2, 3, 5, 11), mesh, (Shard(3),))
        mean = x.mean((2, 3), keepdim=True)
        grown = mean.expand_as(x)
        assert grown.placements == (Shard(3),) and grown.to_local().shape[3] == x.to_local().shape[3]
        assert torch.equal(grown.full_tensor(), mean.full_tensor().expand(2, 3, 5, 11))
        row = torch.arange(11.0, dtype=torch.float64)
        row = shard(row, mesh, (Replicate(),)).expand(2, 3, 5, 11)  # part of the remembered dim is its own
        assert row.placements == (Shard(3),), row.placements
        assert torch.equal(row.full_tensor()[1, 2, 3], torch.arange(11.0, dtype=torch.float64))


def test_what_is_remembered_is_only_a_hint():
    """Fails when two inputs of one shape that lie differently disturb each other, or an expanded tensor is wrong."""
    run_ranks(2, ambiguous_shapes)


# ---- no sharded form, bad arguments, compile ----


def without_a_form(name):
    import haloconv

    x = shard(images(2, 3, 4, 6), mesh_of((2,)), (Shard(3),))
    with haloconv.rules():
        {
            "cumsum": lambda: x.cumsum(3),
            "cumprod": lambda: x.cumprod(3),
            "median": lambda: x.median(3),
            "sort": lambda: x.sort(3),
            "topk": lambda: x.topk(2, 3),
        }[name]()


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "median", "sort", "topk"])
def test_without_a_sharded_form(name):
    """Fails when an op along a sharded dim that has no rule does not say so."""
    raises_on_every_rank(2, without_a_form, name, kinds=("RuntimeError",), match=name)


def bad_call(name):
    import haloconv

    x = shard(images(2, 3, 4, 6), mesh_of((2,)), (Shard(3),))
    with haloconv.rules():
        {
            "dim": lambda: x.sum(4),
            "twice": lambda: x.amax((3, -1)),
            "integers": lambda: x.to(torch.int64).mean(3),
        }[name]()


@pytest.mark.parametrize("name, match", [("dim", "dim is .4"), ("twice", "dim is"), ("integers", "mean")])
def test_bad_arguments(name, match):
    """Fails when a wrong argument is taken, or only some ranks raise."""
    kinds = ("RuntimeError",) if name == "integers" else ("ValueError",)
    raises_on_every_rank(2, bad_call, name, kinds=kinds, match=match)


def compiled():
    import haloconv

    mesh, placements = mesh_of((2,)), (Shard(3),)

    def function(x):
        x = x * x.softmax(3)
        gate = x.mean((2, 3), keepdim=True).sigmoid() + x.amax((2, 3), keepdim=True)
        return (x * gate - x.var((2, 3), keepdim=True)).logsumexp((1, 2, 3)) + x.norm()

    haloconv.enable_rules()
    x = images(2, 3, 4, 7)
    xs = shard(x, mesh, placements).requires_grad_()
    x.requires_grad_()
    want = function(x)
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(xs)
    assert_close(got.full_tensor(), want, "compiled")
    want.sum().backward()
    got.sum().backward()
    assert_close(xs.grad.full_tensor(), x.grad, "compiled gradient")


def test_compiles():
    """Fails when a rule breaks the graph."""
    run_ranks(2, compiled, timeout=120)
