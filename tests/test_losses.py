"""Losses of dense predictions over sharded dims: values and the gradients of all inputs against the unsplit loss."""

import math

import pytest
import torch
import torch.nn.functional as F
from harness import mesh_of, raises_on_every_rank, run_ranks, shard
from torch.distributed.tensor import DTensor, Replicate, Shard

pytestmark = pytest.mark.core

REDUCTIONS = ("mean", "sum", "none")


def images(*sizes, seed=0):
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def classes(*sizes, count=4, seed=1):
    return torch.randint(0, count, sizes, generator=torch.Generator().manual_seed(seed))


def probabilities(*sizes, seed=2):
    return images(*sizes, seed=seed).sigmoid()


# name -> function of (prediction, target, reduction)
ELEMENTWISE = {
    "mse": lambda x, y, r: F.mse_loss(x, y, reduction=r),
    "l1": lambda x, y, r: F.l1_loss(x, y, reduction=r),
    "smooth_l1": lambda x, y, r: F.smooth_l1_loss(x, y, reduction=r, beta=0.7),
    "huber": lambda x, y, r: F.huber_loss(x, y, reduction=r, delta=0.6),
    "soft_margin": lambda x, y, r: F.soft_margin_loss(x, y.detach().sign(), reduction=r),
    "bce": lambda x, y, r: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=r),
    "bce with logits": lambda x, y, r: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=r),
    "kl_div": lambda x, y, r: F.kl_div(x.log_softmax(1), y.softmax(1), reduction=r),
    "kl_div of logs": lambda x, y, r: F.kl_div(
        x.log_softmax(1), y.log_softmax(1), reduction=r, log_target=True
    ),
    "poisson": lambda x, y, r: F.poisson_nll_loss(x, y.exp(), full=True, reduction=r),
    "gaussian": lambda x, y, r: F.gaussian_nll_loss(x, y, x.exp(), reduction=r),
    "hinge embedding": lambda x, y, r: F.hinge_embedding_loss(x, y.sign(), reduction=r),
    "margin ranking": lambda x, y, r: F.margin_ranking_loss(x, 2 * x - 1, y.sign(), margin=0.3, reduction=r),
    "soft targets": lambda x, y, r: F.cross_entropy(x, y.softmax(1), reduction=r, label_smoothing=0.1),
    "cosine": lambda x, y, r: 1 - F.cosine_similarity(x, y, 1).mean(),
}
# those that take the plain linspace, class weights and so on: function of (prediction, target)
MORE = {
    "mse of broadcast": lambda x, y: F.mse_loss(x.mean(1, keepdim=True).expand_as(x), y),
    "bce with weight": lambda x, y: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), weight=torch.linspace(1, 2, x.shape[-1], dtype=x.dtype)
    ),
    "bce with pos_weight": lambda x, y: F.binary_cross_entropy_with_logits(
        x,
        y.sigmoid(),
        weight=torch.linspace(1, 2, x.shape[-2], dtype=x.dtype)[:, None],
        pos_weight=torch.linspace(1, 3, x.shape[1], dtype=x.dtype)[:, None, None],
    ),
    "kl_div batchmean": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "multilabel soft margin": lambda x, y: F.multilabel_soft_margin_loss(x, y.sigmoid()),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, 2 * y + 1),
    "latitude weighted": lambda x, y: (
        (x - y) ** 2 * torch.linspace(-1.5, 1.5, x.shape[-2], dtype=x.dtype).cos()[:, None]
    ).mean(),
    "longitude weighted": lambda x, y: (
        ((x - y).abs() * torch.linspace(-1.5, 1.5, x.shape[-1], dtype=x.dtype).cos()).mean((2, 3)).sum()
    ),
    "dice": lambda x, y: (
        1
        - (
            (2 * (x.softmax(1) * y.sigmoid()).sum((2, 3)) + 1)
            / (x.softmax(1).sum((2, 3)) + y.sigmoid().sum((2, 3)) + 1)
        ).mean()
    ),
    "dice of all": lambda x, y: (
        1 - (2 * (x.sigmoid() * y.sigmoid()).sum() + 1e-3) / (x.sigmoid().sum() + y.sigmoid().sum() + 1e-3)
    ),
    "focal": lambda x, y: focal(x, y.sigmoid()),
    "total variation": lambda x, y: (x.sigmoid() * (1 - x.sigmoid())).sum() / x.numel() + x.abs().mean(),
    "two terms": lambda x, y: F.mse_loss(x, y) + 0.5 * F.l1_loss(x, y) - x.mean() + 2,
}


def focal(x, y, gamma=2.0, alpha=0.25):
    probability = torch.sigmoid(x)
    ce = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    right = probability * y + (1 - probability) * (1 - y)
    return ((alpha * y + (1 - alpha) * (1 - y)) * ce * (1 - right) ** gamma).mean()


# function of (logits, classes)
CATEGORICAL = {
    "cross entropy": lambda x, y, r: F.cross_entropy(x, y, reduction=r),
    "with ignored": lambda x, y, r: F.cross_entropy(x, y, ignore_index=1, reduction=r),
    "with weights": lambda x, y, r: F.cross_entropy(
        x, y, weight=torch.linspace(0.5, 2, x.shape[1], dtype=x.dtype), ignore_index=2, reduction=r
    ),
    "smoothed": lambda x, y, r: F.cross_entropy(x, y, label_smoothing=0.1, reduction=r),
    "smoothed with ignored": lambda x, y, r: F.cross_entropy(
        x, y, label_smoothing=0.1, ignore_index=1, reduction=r
    ),
    "nll": lambda x, y, r: F.nll_loss(x.sigmoid().log_softmax(1), y, reduction=r),
    "focal": lambda x, y, r: (
        (
            1
            - x.softmax(1)
            .mul(F.one_hot(y.full_tensor() if isinstance(y, DTensor) else y, 4).movedim(-1, 1))
            .sum(1)
        )
        ** 2
        * F.cross_entropy(x, y, reduction="none")
    ).mean(),
}


def compare(function, x, y, mesh, placements, y_placements, what):
    """y_placements None: a plain target. Where it has a gradient, that is compared too."""
    grads_of_y = y.is_floating_point() and y_placements is not None
    x = x.detach().clone().requires_grad_()
    y = y.detach().clone().requires_grad_(grads_of_y)
    xs = shard(x, mesh, placements).requires_grad_()
    ys = y.detach() if y_placements is None else shard(y, mesh, y_placements).requires_grad_(grads_of_y)
    want, got = function(x, y), function(xs, ys)
    assert isinstance(got, DTensor), f"{what}: {type(got)}"
    whole = got.detach().full_tensor()
    assert whole.dtype == want.dtype and whole.shape == want.shape, what
    close = torch.allclose(whole, want, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert close, f"{what}: {whole} instead of {want}"
    if want.dim() == 0:
        assert all(p.is_replicate() for p in got.placements), f"{what}: {got.placements}"
        assert got.item() == whole.item() or math.isnan(whole.item()), what
        want.backward()
        got.backward()
    else:
        grad = images(*want.shape, seed=5)
        want.backward(grad)
        got.backward(shard(grad, mesh, got.placements))
    for which, plain, sharded in [("input", x, xs), ("target", y, ys)]:
        if not plain.requires_grad or plain.grad is None:
            continue
        grad = sharded.grad
        assert grad is not None, f"{what}: no gradient of the {which}"
        assert not any(p.is_partial() for p in grad.placements), f"{what}: {grad.placements}"
        same = torch.allclose(grad.full_tensor(), plain.grad, rtol=1e-9, atol=1e-9, equal_nan=True)
        assert same, f"{what}: gradient of the {which}\n{grad.full_tensor()}\n{plain.grad}"
        assert tuple(grad.placements) == tuple(sharded.placements), f"{what}: {which} {grad.placements}"


def without_classes(placements):
    return tuple(Shard(p.dim - (p.dim > 1)) if p.is_shard() else p for p in placements)


def plain_counts_as_replicated():
    """What parallelize does."""
    from haloconv import _dtensor

    _dtensor.allow_implicit_replication()


def every_loss(mesh_shape, dims, sizes):
    import haloconv

    plain_counts_as_replicated()
    mesh, placements = mesh_of(mesh_shape), tuple(Shard(dim) if dim >= 0 else Replicate() for dim in dims)
    x, y = images(*sizes), images(*sizes, seed=3)
    labels = classes(sizes[0], *sizes[2:])
    with haloconv.rules():
        haloconv.reset_comm_stats()
        for kind in (placements, None):
            for name, function in ELEMENTWISE.items():
                for r in REDUCTIONS:
                    if kind is None and r != "mean":
                        continue
                    compare(
                        lambda a, b, f=function, r=r: f(a, b, r),
                        x,
                        y,
                        mesh,
                        placements,
                        kind,
                        f"{name} {r} {kind}",
                    )
            for name, function in MORE.items():
                compare(function, x, y, mesh, placements, kind, f"{name} {kind}")
        for kind in (without_classes(placements), None):
            for name, function in CATEGORICAL.items():
                for r in REDUCTIONS:
                    compare(
                        lambda a, b, f=function, r=r: f(a, b, r),
                        x,
                        labels,
                        mesh,
                        placements,
                        kind,
                        f"{name} {r} {kind}",
                    )
        assert "gather" not in haloconv.comm_stats()["by_op"]


LAYOUTS = [
    ((1,), (3,), (2, 4, 3, 5)),
    ((2,), (3,), (2, 4, 4, 9)),
    ((3,), (2,), (2, 4, 7, 5)),
    ((4,), (3,), (1, 4, 3, 5)),
    ((2, 2), (2, 3), (2, 4, 5, 7)),
    ((2, 2), (0, 3), (3, 4, 4, 5)),
    ((2, 2), (-1, 3), (3, 4, 2, 6)),
]


@pytest.mark.parametrize("mesh_shape, dims, sizes", LAYOUTS)
def test_losses_equal_unsplit(mesh_shape, dims, sizes):
    """Fails when a loss or a gradient differs, or a scalar loss is not the same number on every rank."""
    run_ranks(math.prod(mesh_shape), every_loss, mesh_shape, dims, sizes, timeout=200)


# ---- class targets: what is ignored, other ranks of tensors, weights ----


def ignored_pixels():
    import haloconv

    plain_counts_as_replicated()
    mesh, placements = mesh_of((3,)), (Shard(3),)
    x = images(2, 4, 3, 7)
    of_one_rank, of_all = classes(2, 3, 7), torch.full((2, 3, 7), 1)
    of_one_rank[:, :, 3:6] = 1
    weight = torch.linspace(0.5, 2, 4, dtype=torch.float64)
    with haloconv.rules():
        for name, labels in [("one rank", of_one_rank), ("all ranks", of_all)]:
            for kind in ((Shard(2),), None):
                for r in REDUCTIONS:
                    for given in (None, weight):
                        compare(
                            lambda a, b, r=r, w=given: F.cross_entropy(
                                a, b, weight=w, ignore_index=1, reduction=r
                            ),
                            x,
                            labels,
                            mesh,
                            placements,
                            kind,
                            f"everything ignored on {name}, {r}, {kind}",
                        )


def test_ignored_pixels():
    """Fails when a rank whose pixels are all ignored counts, or when nothing is left and the mean is not NaN."""
    run_ranks(3, ignored_pixels)


def other_ranks_of_tensors():
    import haloconv

    plain_counts_as_replicated()
    mesh = mesh_of((2,))
    weight = torch.linspace(0.5, 2, 4, dtype=torch.float64)
    with haloconv.rules():
        for sizes, placement, kind in [  # of the input and the target
            ((5, 4), Shard(0), Shard(0)),
            ((2, 4, 7), Shard(2), Shard(1)),
            ((2, 4, 6), Shard(0), Shard(0)),
            ((5, 4, 3, 2), Shard(0), Shard(0)),
            ((2, 4, 3, 6), Shard(3), Replicate()),
            ((3, 4, 5, 2, 5), Shard(0), Shard(0)),
            ((2, 4, 4, 2, 5), Shard(2), Shard(1)),
        ]:
            labels = classes(sizes[0], *sizes[2:])
            for given in ((kind,), None):
                what = f"{sizes}, {placement}, {given}"
                compare(F.cross_entropy, images(*sizes), labels, mesh, (placement,), given, what)
            compare(
                lambda a, b: F.cross_entropy(a, b, weight=weight, label_smoothing=0.1, ignore_index=1),
                images(*sizes),
                labels,
                mesh,
                (placement,),
                None,
                f"weights, smoothed, {sizes}",
            )
        one_column = images(2, 4, 3, 1), classes(2, 3, 1)
        compare(F.cross_entropy, *one_column, mesh, (Shard(3),), (Shard(2),), "one column")
        x, labels = images(2, 4, 3, 5), classes(2, 3, 5)
        logits, ys = F.log_softmax(x, 1), shard(labels, mesh, (Shard(2),))
        assert torch.allclose(F.nll_loss(logits, ys).full_tensor(), F.nll_loss(logits, labels))
        y = images(2, 4, 3, 5, seed=4)
        compare(torch.dist, x, y, mesh, (Shard(3),), (Shard(3),), "dist")


def test_other_ranks_of_tensors():
    """Fails when only images of one layout work."""
    run_ranks(2, other_ranks_of_tensors)


def half_precision():
    import haloconv

    plain_counts_as_replicated()
    mesh, placements = mesh_of((2,)), (Shard(3),)
    x, y, labels = images(2, 4, 64, 65), images(2, 4, 64, 65, seed=3), classes(2, 64, 65)
    x[:, :, :, ::5] += 30  # sums that half precision does not hold
    with haloconv.rules():
        for dtype in (torch.float16, torch.bfloat16):
            for name, function in {
                "mse": lambda x, y, labels: F.mse_loss(x, y),
                "cross entropy": lambda x, y, labels: F.cross_entropy(x * 20, labels),
                "mean": lambda x, y, labels: (x * x).mean(),
            }.items():
                plain = x.to(dtype).requires_grad_()
                sharded = shard(x.to(dtype), mesh, placements).requires_grad_()
                other = y.to(dtype)
                want = function(plain.double(), other.double(), labels)
                got = function(sharded, shard(other, mesh, placements), labels)
                assert got.dtype == dtype
                unit = 16 * torch.finfo(dtype).eps
                assert abs(got.item() / want.item() - 1) < unit, (name, dtype, got.item(), want.item())
                want.backward()
                got.backward()
                if name != "cross entropy":  # whose log_softmax is rounded before exp
                    grad = sharded.grad.full_tensor()
                    assert torch.allclose(grad, plain.grad, rtol=unit, atol=1e-6), (name, dtype)


def test_half_precision():
    """Fails when a sum of half precision overflows or is added up in half precision."""
    run_ranks(2, half_precision)


def little_is_sent():
    import haloconv

    plain_counts_as_replicated()
    mesh = mesh_of((2,))
    x = shard(images(2, 4, 32, 33), mesh, (Shard(3),)).requires_grad_()
    labels = classes(2, 32, 33)
    y = shard(images(2, 4, 32, 33, seed=3), mesh, (Shard(3),))
    with haloconv.rules():
        for name, function in {
            "mse": lambda: F.mse_loss(x, y),
            "cross entropy": lambda: F.cross_entropy(
                x, shard(labels, mesh, (Shard(2),)), label_smoothing=0.1
            ),
            "plain labels": lambda: F.cross_entropy(x, labels),
            "dice": lambda: MORE["dice"](x, y),
        }.items():
            haloconv.reset_comm_stats()
            function().backward()
            stats = haloconv.comm_stats()
            assert "gather" not in stats["by_op"] and stats["bytes"] < 2048, (name, stats)


def test_little_is_sent():
    """Fails when more than sums travels between the ranks."""
    run_ranks(2, little_is_sent)


def bad_call(name):
    import haloconv

    mesh = mesh_of((2,))
    x = shard(images(2, 4, 3, 6), mesh, (Shard(3),))
    with haloconv.rules():
        if name == "pixels":
            torch.ops.aten.nll_loss2d_forward(x, classes(2, 3, 5), None, 1, -100)
        else:
            torch.ops.aten.mse_loss(x, images(2, 4, 3, 5))


@pytest.mark.parametrize("name", ["pixels", "values"])
def test_bad_arguments(name):
    """Fails when a target of another size is taken."""
    raises_on_every_rank(2, bad_call, name, match="target has shape")


def compiled():
    import haloconv

    plain_counts_as_replicated()

    def function(x, y, labels):
        return F.cross_entropy(x, labels) + F.mse_loss(x, y) + MORE["dice"](x, y)

    haloconv.enable_rules()
    mesh, x, y, labels = mesh_of((2,)), images(2, 4, 3, 7), images(2, 4, 3, 7, seed=3), classes(2, 3, 7)
    xs, ys = (shard(t, mesh, (Shard(3),)) for t in (x, y))
    x.requires_grad_()
    xs.requires_grad_()
    want = function(x, y, labels)
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(
        xs, ys, shard(labels, mesh, (Shard(2),))
    )
    want.backward()
    got.backward()
    assert torch.allclose(got.full_tensor(), want, rtol=1e-9, atol=1e-9)
    assert torch.allclose(xs.grad.full_tensor(), x.grad, rtol=1e-9, atol=1e-9)


def test_compiles():
    """Fails when a rule breaks the graph."""
    run_ranks(2, compiled, timeout=120)
