"""Batch, instance, group, layer and RMS norms of sharded tensors against unsplit ones: values, gradients, buffers."""

import copy
import itertools
import os

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import (
    assert_close,
    assert_shards,
    full,
    mesh_of,
    raises_on_every_rank,
    run_ranks,
    shard,
)
from rulecase import as_format, check, random
from torch.distributed.tensor import Replicate, Shard

pytestmark = pytest.mark.core

# world: (mesh shape, what each mesh dim does with the activation)
LAYOUTS = {
    1: [((1,), (3,))],
    2: [((2,), dims) for dims in ((3,), (2,), (0,), (1,), (4,), (None,))],
    3: [((3,), dims) for dims in ((3,), (2,), (0,), (1,))],
    4: [
        ((4,), (3,)),
        ((4,), (2,)),
        *(((2, 2), dims) for dims in ((2, 3), (0, 3), (3, 1), (1, 2), (None, 3), (3, None), (None, None))),
    ],
}


def layouts(world, ndim):
    for shape, dims in LAYOUTS[world]:
        if all(dim is None or dim < ndim for dim in dims):
            yield mesh_of(shape), tuple(Replicate() if dim is None else Shard(dim) for dim in dims)


def compare(mesh, placements, plain, x, steps=2, rtol=1e-9, atol=1e-9):
    """A module unsplit against parallelized: outputs, input gradients, parameters' gradients and buffers."""
    import haloconv

    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh, dim=(0, -1)[-mesh.ndim :])
    for step in range(steps):
        x = (x * (1 + step) + step).detach()
        a, b = x.clone().requires_grad_(), shard(x, mesh, placements).requires_grad_()
        want, got = plain(a), sharded(b)
        assert_shards(got, want, placements, "output", rtol, atol)
        form = torch.channels_last if x.dim() == 4 and not x.is_contiguous() else torch.contiguous_format
        if want.is_contiguous(memory_format=form) and got.to_local().numel():
            assert got.to_local().is_contiguous(memory_format=form), "memory format of the output"
        grad = random(want.shape, 7 + step, want.dtype)
        want.backward(grad)
        got.backward(shard(grad, mesh, placements))
        assert_shards(b.grad, a.grad, placements, "input gradient", rtol, atol)
        for (name, p), q in zip(plain.named_parameters(), sharded.parameters()):
            assert all(placement.is_replicate() for placement in q.grad.placements), name
            assert_close(q.grad.to_local(), p.grad, f"gradient of {name}", rtol, atol)
        for (name, p), q in zip(plain.named_buffers(), sharded.buffers()):
            assert_close(q.to_local(), p, name, rtol, atol)


def randomized(module, dtype=torch.float64):
    """Parameters and buffers that are neither zeros nor ones."""
    generator = torch.Generator().manual_seed(5)
    module = module.to(dtype)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module


def compare_modules(world, cases):
    """cases: (name, module, shape). Returns how many were compared."""
    count = 0
    for number, (name, module, shape) in enumerate(cases):
        some = list(layouts(world, len(shape)))
        if world == 4 and os.environ.get("HALOCONV_LONG") != "1":
            some = some[number % 2 :: 2]  # the layouts take turns: a kind has more than two cases
        for mesh, placements in some:
            for last in (False, True) if len(shape) == 5 or (len(shape) == 4 and number < 4) else (False,):
                x = as_format(random(shape), last)
                try:
                    compare(mesh, placements, copy.deepcopy(module), x, steps=2 if number == 0 else 1)
                except Exception as error:
                    where = f"{name} on {shape}, {tuple(mesh.shape)}, {placements}, channels_last={last}"
                    raise AssertionError(f"{where}: {error}") from error
                count += 1
    return count


def modules(world, kind):
    return compare_modules(world, CASES[kind]())


# ---- batch norm ----


class Double(nn.Module):
    """Two norms with something between them, one of which is in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)

    def train(self, mode=True):
        super().train(mode)
        self.first.eval()
        return self

    def forward(self, x):
        return self.second(torch.relu(self.first(x)) * 3)


def batch_norms():
    shapes = [(2, 4, 5, 7), (1, 4, 3, 1), (3, 4, 1, 2), (1, 5, 2, 9)]
    for shape in shapes:
        yield "2-D", randomized(nn.BatchNorm2d(shape[1])), shape
    yield "no momentum", randomized(nn.BatchNorm2d(4, momentum=None)), shapes[0]
    yield "no parameters", randomized(nn.BatchNorm2d(4, affine=False)), shapes[0]
    yield "no running statistics", randomized(nn.BatchNorm2d(4, track_running_stats=False)), shapes[0]
    yield "evaluation", randomized(nn.BatchNorm2d(4)).eval(), shapes[0]
    yield "evaluation", randomized(nn.BatchNorm2d(4, affine=False)).eval(), shapes[1]
    yield (
        "evaluation without statistics",
        randomized(nn.BatchNorm2d(4, track_running_stats=False)).eval(),
        shapes[0],
    )
    yield "frozen and not", randomized(Double()).train(), shapes[0]
    yield "1-D", randomized(nn.BatchNorm1d(3)), (3, 3, 5)
    yield "1-D without space", randomized(nn.BatchNorm1d(3)), (5, 3)
    yield "3-D", randomized(nn.BatchNorm3d(3)), (2, 3, 2, 5, 3)


# ---- the others ----


def group_norms():
    for shape, groups in (((2, 4, 5, 7), 2), ((3, 6, 1, 2), 2), ((1, 6, 3, 5), 3), ((2, 4, 3, 3), 1)):
        yield "groups", randomized(nn.GroupNorm(groups, shape[1])), shape
    yield "each channel", randomized(nn.GroupNorm(4, 4)), (2, 4, 5, 7)
    yield "no parameters", randomized(nn.GroupNorm(2, 4, affine=False)), (2, 4, 5, 7)
    yield "1-D", randomized(nn.GroupNorm(3, 6)), (2, 6, 5)
    yield "3-D", randomized(nn.GroupNorm(2, 4)), (2, 4, 2, 5, 3)


def layer_norms():
    for normalized in ((7,), (5, 7), (4, 5, 7)):
        yield f"{normalized}", randomized(nn.LayerNorm(normalized)), (2, 4, 5, 7)
    yield "one column", randomized(nn.LayerNorm((3, 2))), (2, 3, 3, 2)
    yield "no bias", randomized(nn.LayerNorm((5, 7), bias=False)), (2, 4, 5, 7)
    yield "no parameters", randomized(nn.LayerNorm((5, 7), elementwise_affine=False)), (2, 4, 5, 7)
    yield "channels at the end", randomized(nn.LayerNorm(5)), (2, 3, 7, 5)
    yield "3 dims", randomized(nn.LayerNorm(4)), (2, 7, 4)


CASES = {"batch": batch_norms, "group": group_norms, "layer": layer_norms}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", CASES)
def test_like_unsplit(kind, world):
    """Fails when a norm of shards differs from the unsplit one, in either direction or in its buffers."""
    assert min(run_ranks(world, modules, world, kind, timeout=120)) >= 8


# ---- composites: what torch makes of batch norm, pooling and the like ----


def composites(world):
    import haloconv
    from haloconv._dtensor import allow_implicit_replication

    haloconv.enable_rules()
    allow_implicit_replication()
    one = [(2, 4, 5, 7), (1, 3, 3, 2)]
    weights = [random((4,)), random((5, 7)), random((7,))]
    count = check(
        world,
        [
            ("instance", F.instance_norm, one),
            ("instance, 1-D", F.instance_norm, [(2, 4, 5)]),
            ("instance, affine", lambda x: F.instance_norm(x, None, None, weights[0], weights[0]), one[:1]),
            ("local response", lambda x: F.local_response_norm(x, 3, 0.3), one),
            ("plain weights", lambda x: F.batch_norm(x, None, None, weights[0], weights[0], True), one[:1]),
            ("RMS", lambda x: F.rms_norm(x, (5, 7), weights[1]), one[:1]),
            ("RMS of a dim", lambda x: F.rms_norm(x, (7,), weights[2]), one[:1]),
            ("layer, plain weights", lambda x: F.layer_norm(x, (5, 7), weights[1], weights[1]), one[:1]),
            ("normalize", F.normalize, one),
        ],
        channels_last=(False,),
    )
    mesh = mesh_of((world,))
    for dim, training in itertools.product((2, 3), (True, False)):
        plain = randomized(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)).train(training)
        compare(mesh, (Shard(dim),), plain, random((2, 4, 5, 7)))
        count += 1
    return count


@pytest.mark.parametrize("world", [2, 4])
def test_what_torch_composes(world):
    """Fails when a norm that reaches the rules as other ops differs from the unsplit one."""
    assert min(run_ranks(world, composites, world, timeout=120)) >= 20


# ---- every form of an op ----


def forms():
    """Ops that no CPU model reaches: called as autograd would."""
    import haloconv

    haloconv.enable_rules()
    aten = torch.ops.aten
    mesh = mesh_of((3,))
    x = random((2, 4, 3, 7))
    grad = random(x.shape, 1)
    weight, bias, mean, var = (random((4,), seed).abs() + 0.5 for seed in range(2, 6))
    xs, grads = (shard(t, mesh, (Shard(3),)) for t in (x, grad))

    def replicated(t):
        return shard(t, mesh, (Replicate(),))

    def run(op, reference, *rest, stats=True):
        a = [mean.clone(), var.clone()] if stats else []
        b = [replicated(t) for t in a]
        with torch.no_grad():
            want = reference(x, weight, bias, *a, *rest)
            got = op(xs, *(replicated(t) for t in (weight, bias)), *b, *rest)
        assert_shards(got[0], want[0], (Shard(3),), f"{op}")
        for p, q in zip(b, a):
            assert_close(full(p), q, f"{op}: running statistics")
        return want, got

    legit = aten._native_batch_norm_legit
    for op, training in itertools.product((aten.native_batch_norm.default, legit.default), (True, False)):
        want, got = run(op, op, training, 0.3, 1e-5)
        for p, q in zip(got[1:], want[1:]):
            assert_close(full(p), q, f"{op}: saved")
    run(legit.no_stats, legit.no_stats, True, 0.3, 1e-5, stats=False)
    no_training = aten._native_batch_norm_legit_no_training.default
    run(no_training, no_training, 0.3, 1e-5)
    run(aten._batch_norm_no_update.default, aten._batch_norm_no_update.default, 0.3, 1e-5)
    for op in (
        aten._batch_norm_with_update_functional.default,
        aten._native_batch_norm_legit_functional.default,
    ):
        rest = (0.3, 1e-5) if "update" in str(op) else (True, 0.3, 1e-5)
        want, got = run(op, op, *rest)
        for p, q in zip(got[-2:], want[-2:]):
            assert_close(full(p), q, f"{op}: new running statistics")

    def train(*args):
        return aten.native_batch_norm.default(*args[:5], True, *args[-2:])

    want, got = run(aten._batch_norm_with_update.default, train, 0.3, 1e-5)
    saved, saved_s = want[1:3], got[1:3]
    assert len(got) == 4
    rest = (True, 0.3, 1e-5)
    for op, length in ((aten.cudnn_batch_norm.default, 4), (aten.miopen_batch_norm.default, 3)):
        want, got = run(op, train, *rest)
        assert len(got) == length
        for p, q in zip(got[1:3], want[1:]):
            assert_close(full(p), q, f"{op}: saved")
    stats = [mean, var, *saved]
    stats_s = [replicated(mean), replicated(var), *saved_s]
    ws, reserve = replicated(weight), replicated(torch.empty(0, dtype=torch.uint8))
    with torch.no_grad():
        mask = [True, True, True]
        want = aten.native_batch_norm_backward(grad, x, weight, *stats, True, 1e-5, mask)
        for got in (
            aten.native_batch_norm_backward(grads, xs, ws, *stats_s, True, 1e-5, mask),
            aten.batch_norm_backward(grads, xs, ws, *stats_s, True, 1e-5, mask, reserve),
            aten.cudnn_batch_norm_backward(xs, grads, ws, *stats_s, 1e-5, reserve),
            aten.miopen_batch_norm_backward(xs, grads, ws, *stats_s, 1e-5),
            aten.native_batch_norm_backward(grads, xs, ws, *stats_s, True, 1e-5, [False, True, True]),
        ):
            for p, q in zip(got, want):
                assert p is None or torch.allclose(full(p), q, rtol=1e-9, atol=1e-9)

        for shape in ((7,), (3, 7)):
            w = random(shape, 8).abs() + 0.5
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            with torch.enable_grad():
                want = F.rms_norm(a, shape, b, 1e-5)
                want.backward(grad)
            ws = replicated(w)
            got, rstd = haloconv._dtensor.handlers()[aten._fused_rms_norm.default](
                aten._fused_rms_norm.default, (xs, shape, ws, 1e-5), {}
            )
            assert_shards(got, want, (Shard(3),), "RMS norm")
            of_x, of_w = aten._fused_rms_norm_backward(grads, xs, shape, rstd, ws, [True, True])
            assert_shards(of_x, a.grad, (Shard(3),), "RMS norm's input gradient")
            assert_close(full(of_w), b.grad, "RMS norm's weight gradient")


def test_every_form():
    """Fails when a form of an op that only other devices or compilers use differs from the one tested above."""
    run_ranks(3, forms)


# ---- precision ----


def half_precision(world):
    """Not much worse than unsplit, measured against float64."""
    import haloconv

    mesh = mesh_of((world,))
    for number, (make, parameters) in enumerate(
        itertools.product(
            (
                lambda: nn.BatchNorm2d(4),
                lambda: nn.GroupNorm(2, 4),
                lambda: nn.LayerNorm((6, 7)),
                lambda: nn.LayerNorm(7),
            ),
            (torch.float32, torch.bfloat16),
        )
    ):
        exact = randomized(make())
        plain = copy.deepcopy(exact).to(parameters)
        sharded = haloconv.parallelize(copy.deepcopy(plain), mesh)
        for last in (False, True):
            x, grad = (as_format(random((2, 4, 6, 7), seed, torch.bfloat16), last) for seed in (0, 1))
            a, b = x.clone().requires_grad_(), shard(x, mesh, (Shard(3),)).requires_grad_()
            c = x.double().requires_grad_()
            try:
                want = plain(a)
            except RuntimeError:
                continue  # dtypes that torch does not mix
            got, truth = sharded(b), exact(c)
            want.backward(grad)
            got.backward(shard(grad, mesh, (Shard(3),)))
            truth.backward(grad.double())
            for p, q, t in ((got, want, truth), (b.grad, a.grad, c.grad)):
                assert p.dtype == torch.bfloat16
                error, unsplit = ((v.double() - t).abs().max().item() for v in (full(p), q))
                assert error <= 2 * unsplit + 1e-3, (number, error, unsplit)
            for p, q in zip(sharded.parameters(), exact.parameters()):
                assert p.grad.dtype == parameters
                assert torch.allclose(full(p.grad).double(), q.grad, rtol=0.05, atol=0.05), number
                p.grad = q.grad = None


def far_from_zero(world):
    """Mean 1e6, deviation 1: the statistics as exact as those of the unsplit norm."""
    import haloconv

    haloconv.enable_rules()
    mesh = mesh_of((world,))
    x = (random((4, 3, 16, 37)) + 1e6).float()
    exact = x.double()
    mean, var = exact.mean((0, 2, 3)), exact.var((0, 2, 3))
    running = [shard(torch.zeros(3), mesh, (Replicate(),)) for _ in range(2)]
    plain = [torch.zeros(3), torch.zeros(3)]
    F.batch_norm(shard(x, mesh, (Shard(3),)), *running, training=True, momentum=1.0)
    F.batch_norm(x, *plain, training=True, momentum=1.0)
    for got, unsplit, want in zip(running, plain, (mean, var)):
        error, allowed = ((t.double() - want).abs().max().item() for t in (full(got), unsplit))
        assert error <= 2 * allowed + 1e-7 * want.abs().max().item() + 2e-3 * (want is var), (error, allowed)


@pytest.mark.parametrize("case", [half_precision, far_from_zero])
def test_precision(case):
    """Fails when statistics are counted in half precision, or cancel."""
    run_ranks(3, case, 3)


# ---- communication, errors, compiling ----


def communication():
    import haloconv

    mesh = mesh_of((3,))
    x = random((2, 8, 16, 32))
    for module, moments in ((nn.BatchNorm2d(8), 8), (nn.GroupNorm(4, 8), 8), (nn.LayerNorm((16, 32)), 16)):
        sharded = haloconv.parallelize(randomized(module), mesh)
        xs = shard(x, mesh, (Shard(3),)).requires_grad_()
        haloconv.reset_comm_stats()
        out = sharded.forward(xs)  # without what parallelize does around it
        stats = haloconv.comm_stats()
        assert set(stats["by_op"]) == {"exchange"}, stats
        assert stats["bytes"] == 2 * 3 * moments * 8, stats
        haloconv.reset_comm_stats()
        out.backward(out.detach())
        stats = haloconv.comm_stats()["by_op"]
        assert set(stats) <= {"all_reduce", "gradients"}, stats
        assert stats["all_reduce"]["all_reduces"] == 1, stats
        assert stats["all_reduce"]["bytes"] <= 2 * 2 * moments * 8
        if isinstance(module, nn.BatchNorm2d):
            assert "gradients" not in stats, stats
            haloconv.reset_comm_stats()
            sharded.eval()
            out = sharded.forward(xs)
            assert not haloconv.comm_stats()["by_op"]
            out.backward(out.detach())
            assert set(haloconv.comm_stats()["by_op"]) == {"gradients"}


def test_statistics_are_all_that_is_sent():
    """Fails when an activation is gathered, a reduction is done twice, or evaluation communicates."""
    run_ranks(3, communication)


def one_value():
    import haloconv

    haloconv.enable_rules()
    mesh = mesh_of((2,))
    x = random((1, 3, 1, 2))
    a, b = x.clone().requires_grad_(), shard(x, mesh, (Shard(3),)).requires_grad_()
    for t in (a, b):  # one value on each rank, two in all
        F.batch_norm(t, None, None, training=True).sin().sum().backward()
    assert_close(full(b.grad), a.grad, "input gradient")
    F.batch_norm(shard(x[..., :1], mesh, (Shard(3),)), None, None, training=True)


def test_one_value_in_all():
    """Fails when what torch refuses for the whole tensor is refused for a shard, or not at all."""
    raises_on_every_rank(2, one_value, match="more than 1 value per channel")


def wrong(number):
    import haloconv
    from haloconv._dtensor import allow_implicit_replication

    haloconv.enable_rules()
    allow_implicit_replication()
    x = shard(random((2, 4, 5, 3)), mesh_of((2,)), (Shard(3),))
    [
        lambda: F.batch_norm(x, None, None, torch.ones(4, dtype=torch.float16), training=True),
        lambda: torch.ops.aten.native_batch_norm(x, None, None, None, None, False, 0.1, 1e-5),
        lambda: torch.ops.aten.native_layer_norm(x, (4, 3), None, None, 1e-5),
        lambda: torch.ops.aten.native_layer_norm(x, (5, 3), torch.ones(3), None, 1e-5),
    ][number]()


@pytest.mark.parametrize(
    "number, match",
    list(
        enumerate(
            (
                "weight has dtype torch.float16, expected torch.float64",
                "running_mean is None",
                r"normalized_shape is \(4, 3\)",
                r"weight has shape \(3,\)",
            )
        )
    ),
)
def test_wrong_arguments(number, match):
    """Fails when a wrong argument hangs a rank or does not say what is wrong."""
    raises_on_every_rank(2, wrong, number, match=match)


def compiled():
    import haloconv

    mesh = mesh_of((2,))
    x, grad = random((2, 4, 5, 7)), random((2, 4, 5, 7), 1)

    def make():
        return randomized(nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm((5, 7))))

    eager, sharded = (haloconv.parallelize(make(), mesh) for _ in range(2))
    fast = torch.compile(sharded, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the running statistics of the first step show in the second's
        results = []
        for model in (eager, fast):
            xs = shard(x, mesh, (Shard(3),)).requires_grad_()
            out = model(xs)
            out.backward(shard(grad, mesh, (Shard(3),)))
            results.append([out, xs.grad])
        tensors = zip(
            [*results[0], *(p.grad for p in eager.parameters()), *eager.buffers()],
            [*results[1], *(p.grad for p in sharded.parameters()), *sharded.buffers()],
        )
        for want, got in tensors:
            assert_close(full(got), full(want), "compiled")


def test_compiled():
    """Fails when a norm does not trace, or its running statistics stay behind."""
    run_ranks(2, compiled, timeout=150)


def twice():
    import haloconv

    haloconv.enable_rules()
    mesh = mesh_of((2,))
    x = random((2, 4, 5, 7))
    a, b = x.clone().requires_grad_(), shard(x, mesh, (Shard(3),)).requires_grad_()
    for t in (a, b):
        first = torch.autograd.grad(
            F.batch_norm(t, None, None, training=True).sin().sum(), t, create_graph=True
        )
        (first[0] ** 2).sum().backward()
    assert_close(full(b.grad), a.grad, "gradient of the gradient")


def test_second_gradient():
    """Fails when the derivative of a batch norm's gradient is wrong."""
    run_ranks(2, twice)
