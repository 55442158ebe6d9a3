"""Training a parallelized model, in the ways people train, and the module afterwards.

The oracle is that of test_parallelize.py: the same float64 model and data, unsplit.
"""

import copy
import io

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import (
    assert_close,
    assert_replicated,
    full,
    mesh_of,
    run_ranks,
)
from parallelcase import Net, both, compare_gradients, data, make, step

# ------------------------------------------------------------------------------------------------ ways of
# training


def accumulate(world):
    haloconv, mesh, plain, sharded = both(world)
    for number in range(3):
        step(haloconv, plain, sharded, mesh, data(seed=number))
        compare_gradients(plain, sharded, f"gradient after {number + 1} backwards")
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        p.grad = None
        q.grad = None
    step(haloconv, plain, sharded, mesh, data(seed=7))
    compare_gradients(plain, sharded, "gradient after zero_grad(set_to_none=True)")
    sharded.zero_grad(set_to_none=False)
    plain.zero_grad(set_to_none=False)
    step(haloconv, plain, sharded, mesh, data(seed=8))
    compare_gradients(plain, sharded, "gradient after zero_grad(set_to_none=False)")
    # two losses of two forwards in one backward
    total = [0, 0]
    for number in (1, 2):
        total[0] = total[0] + (plain(data(seed=number)) ** 2).mean()
        total[1] = (
            total[1] + (haloconv.gather(sharded(haloconv.distribute(data(seed=number), mesh))) ** 2).mean()
        )
    total[0].backward()
    total[1].backward()
    compare_gradients(plain, sharded, "gradient of two forwards")


def retained(world):
    haloconv, mesh, plain, sharded = both(world)
    x = data()
    want = (plain(x) ** 2).mean()
    got = (haloconv.gather(sharded(haloconv.distribute(x, mesh))) ** 2).mean()
    for number in range(3):
        want.backward(retain_graph=number < 2)
        got.backward(retain_graph=number < 2)
        compare_gradients(plain, sharded, f"gradient after backward {number + 1} of one graph")


def frozen(world):
    haloconv, mesh, plain, sharded = both(world)
    for model in (plain, sharded):
        model.dw.weight.requires_grad_(False)
        model.pw.bias.requires_grad_(False)
    step(haloconv, plain, sharded, mesh, data())
    compare_gradients(plain, sharded)
    assert sharded.dw.weight.grad is None and sharded.stem.weight.grad is not None
    for model in (plain, sharded):  # thawed later, the rest frozen
        model.zero_grad()
        for p in model.parameters():
            p.requires_grad_(p is model.dw.weight)
    step(haloconv, plain, sharded, mesh, data(seed=2))
    compare_gradients(plain, sharded)
    # frozen before parallelize
    before = make()
    before.stem.weight.requires_grad_(False)
    other = haloconv.parallelize(copy.deepcopy(before), mesh)
    assert not other.stem.weight.requires_grad
    step(haloconv, before, other, mesh, data())
    compare_gradients(before, other)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(torch.tanh(self.conv(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 3, 5, padding=2)
        self.two = nn.Conv2d(3, 3, 5, padding=2)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Unused(nn.Module):
    """A layer that no output depends on, and one that is used only sometimes."""

    def __init__(self):
        super().__init__()
        self.used = nn.Conv2d(3, 3, 3, padding=1)
        self.never = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.used(x)


def used_twice(world, kind):
    haloconv, mesh, plain, sharded = both(world, kind)
    for number in range(2):
        step(haloconv, plain, sharded, mesh, data(seed=number))
        compare_gradients(plain, sharded)
    if kind is Tied:
        assert sharded.one.weight is sharded.two.weight
        assert list(haloconv.full_state_dict(sharded)) == list(plain.state_dict())


def no_graph(world):
    haloconv, mesh, plain, sharded = both(world)
    x = data()
    with torch.no_grad():
        out = sharded(haloconv.distribute(x, mesh))
        assert not out.requires_grad
        assert_close(haloconv.gather(out), plain(x), "output under no_grad")
    step(haloconv, plain, sharded, mesh, x)
    compare_gradients(plain, sharded)
    sharded.eval()
    plain.eval()
    with torch.inference_mode():
        out = sharded(haloconv.distribute(x, mesh))
        assert_close(haloconv.gather(out), plain(x), "output under inference_mode")
    sharded.train()
    with torch.no_grad():  # an optimizer's step by hand
        for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
            p -= 0.1 * p.grad
            q -= 0.1 * q.grad
    plain.zero_grad()
    sharded.zero_grad()
    step(haloconv, plain, sharded, mesh, x)
    compare_gradients(plain, sharded)


@pytest.mark.core
@pytest.mark.parametrize("way", [accumulate, retained, frozen, no_graph], ids=lambda way: way.__name__)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ways_of_training(way, world):
    """Fails when gradient accumulation, retain_graph, frozen parameters, no_grad or inference_mode differ
    from plain torch."""
    run_ranks(world, way, world)


@pytest.mark.core
@pytest.mark.parametrize("kind", [Twice, Tied, Unused])
def test_parameters_used_twice_tied_or_never(kind):
    """Fails when a parameter's gradient is reduced twice, only once of two uses, or waited for though it
    never comes."""
    run_ranks(2, used_twice, 2, kind)


def by_autograd_grad(world):
    haloconv, mesh, plain, sharded = both(world)
    x = data()
    want = torch.autograd.grad((plain(x) ** 2).mean(), list(plain.parameters()))
    got = torch.autograd.grad(
        (haloconv.gather(sharded(haloconv.distribute(x, mesh))) ** 2).mean(), list(sharded.parameters())
    )
    for (name, _), a, b in zip(plain.named_parameters(), want, got, strict=True):
        assert_close(full(b), a, f"autograd.grad for {name}")
    assert all(p.grad is None for p in sharded.parameters())
    step(haloconv, plain, sharded, mesh, x)
    compare_gradients(plain, sharded, "gradient after autograd.grad")
    # for some parameters only, and for the input
    xs = haloconv.distribute(x, mesh).detach().requires_grad_()
    xp = x.clone().requires_grad_()
    got = torch.autograd.grad((haloconv.gather(sharded(xs)) ** 2).mean(), [xs, sharded.dw.weight])
    want = torch.autograd.grad((plain(xp) ** 2).mean(), [xp, plain.dw.weight])
    for a, b in zip(want, got, strict=True):
        assert_close(full(b), a, "autograd.grad for two")


@pytest.mark.core
def test_autograd_grad():
    """Fails when torch.autograd.grad gives partial sums for full ones, or leaves a later backward waiting."""
    run_ranks(2, by_autograd_grad, 2)


def checkpointed(world, reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, x):
            x = F.gelu(self.stem(x))
            x = x + checkpoint(lambda t: self.pw(F.gelu(self.dw(t))), x, use_reentrant=reentrant)
            return self.up(x)

    haloconv, mesh, plain, sharded = both(world, Checkpointed)
    for number in range(2):
        step(haloconv, plain, sharded, mesh, data(seed=number))
        compare_gradients(plain, sharded)


@pytest.mark.core
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    """Fails when activation checkpointing, whose recomputation exchanges again inside backward, hangs or
    differs."""
    run_ranks(2, checkpointed, 2, reentrant)


def autocast(world):
    haloconv, mesh, plain, _ = both(world)
    plain = plain.float()
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh)
    x = data().float()
    exact = copy.deepcopy(plain).double()
    (exact(x.double()) ** 2).mean().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = haloconv.gather(sharded(haloconv.distribute(x, mesh)))
        assert out.dtype == torch.bfloat16
    (out.float() ** 2).mean().backward()
    for (name, p), q in zip(exact.named_parameters(), sharded.parameters(), strict=True):
        assert q.grad.dtype == torch.float32 and all(r.is_replicate() for r in q.grad.placements)
        difference = (q.grad.full_tensor().double() - p.grad).abs().max()
        assert difference <= 0.06 * p.grad.abs().max(), (
            f"{name}: {difference / p.grad.abs().max()}"
        )  # bf16 over 4 layers


@pytest.mark.core
def test_autocast_bf16():
    """Fails when mixed precision gives gradients of the wrong dtype, unreduced ones, or far off."""
    run_ranks(2, autocast, 2)


def broken_backward(world):
    haloconv, mesh, plain, sharded = both(world)
    x = data()

    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.view_as(t)

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("in the middle of backward")

    hook = sharded.stem.register_forward_hook(lambda module, args, out: Explode.apply(out))
    loss = (haloconv.gather(sharded(haloconv.distribute(x, mesh))) ** 2).mean()
    try:
        loss.backward()
    except ArithmeticError as error:
        assert "in the middle" in str(error)
    else:
        raise AssertionError("the exception was swallowed")
    hook.remove()
    del loss
    sharded.zero_grad()
    for number in range(2):
        plain.zero_grad()
        sharded.zero_grad()
        step(haloconv, plain, sharded, mesh, data(seed=number))
        compare_gradients(plain, sharded, "gradient after a broken backward")


@pytest.mark.core
def test_exception_in_backward_then_a_good_step():
    """Fails when the buckets of an interrupted backward spoil or block the next one."""
    run_ranks(2, broken_backward, 2)


def hooked(world):
    """Forward and backward hooks of users see what they would see, and grad hooks too."""
    haloconv, mesh, plain, sharded = both(world)
    for model in (plain, sharded):
        model.count = []
        model.dw.register_full_backward_hook(
            lambda module, gin, gout, model=model: model.count.append(tuple(gin[0].shape))
        )
        model.stem.weight.register_hook(lambda grad: grad * 2)
    step(haloconv, plain, sharded, mesh, data())
    assert plain.count == sharded.count == [(2, 8, 3, 9)]
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert_close(full(q.grad), p.grad, f"gradient of {name} with hooks")


@pytest.mark.core
def test_hooks_keep_working():
    """Fails when a user's module or tensor hooks are lost or see local strips."""
    run_ranks(2, hooked, 2)


def stepping_in_backward(world, swapped):
    """The optimizer's step runs in a hook, while backward goes on; the second model sees what hooks see."""
    haloconv, mesh, plain, sharded = both(world)
    seen = []
    for model in (plain, sharded):
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], 0.1)

            def hook(parameter, optimizer=optimizer):
                seen.append(full(parameter.grad).clone())
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(hook)
    if swapped:  # what is behind a parameter changes, its hooks stay
        for model in (plain, sharded):
            model.float()
            model.double()
            for parameter in model.parameters():  # torch's own engine forgets hooks then
                parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    for number in range(3):
        step(haloconv, plain, sharded, mesh, data(seed=number))
    assert len(seen) == 3 * 2 * len(list(plain.parameters()))
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert_close(full(q.detach()), p.detach(), f"{name} after three steps in backward")
        assert p.grad is None and q.grad is None, name


@pytest.mark.core
@pytest.mark.parametrize("swapped", [False, True])
def test_hooks_after_accumulation_see_the_whole_gradient(swapped):
    """Fails when an optimizer that steps during backward finds no gradient, or this rank's part of it."""
    run_ranks(2, stepping_in_backward, 2, swapped)


def many_buckets(world):
    """More gradient bytes than one bucket (25 MiB) holds, in two dtypes."""
    import haloconv

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                [
                    nn.Conv2d(3, 700, 7, padding=3),
                    nn.Conv2d(700, 700, 3, padding=1),
                    nn.Conv2d(700, 3, 3, padding=1),
                ]
            )
            self.last = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.last(x.double())

    torch.manual_seed(0)
    plain = Wide().float()
    plain.last.double()
    mesh = mesh_of((world,))
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh)
    x = data(1, 4, 6).float()
    haloconv.reset_comm_stats()
    (plain(x) ** 2).mean().backward()
    (haloconv.gather(sharded(haloconv.distribute(x, mesh))) ** 2).mean().backward()
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert all(r.is_replicate() for r in q.grad.placements) and q.grad.dtype == p.grad.dtype, name
        assert_close(full(q.grad), p.grad, f"gradient of {name}", rtol=1e-3, atol=1e-5)  # float32
    return haloconv.comm_stats()["all_reduces"]


@pytest.mark.core
def test_gradients_larger_than_a_bucket():
    """Fails when gradients of several buckets or dtypes are mixed up, or each parameter is reduced by a call
    of its own."""
    counts = run_ranks(2, many_buckets, 2, timeout=120)
    assert all(1 <= count <= 6 for count in counts), counts


# ------------------------------------------------------------------------------------------------ the module
# afterwards


def undone(world):
    haloconv, mesh, plain, sharded = both(world)
    original = {name: type(m) for name, m in plain.named_modules()}
    step(haloconv, plain, sharded, mesh, data())
    back = haloconv.unparallelize(sharded)
    assert back is sharded
    assert {name: type(m) for name, m in back.named_modules()} == original
    for name, value in [*back.named_parameters(), *back.named_buffers()]:
        assert type(value) in (nn.Parameter, torch.Tensor), f"{name}: {type(value)}"
        assert_close(value.detach(), plain.state_dict()[name], name)
    back.zero_grad()
    plain.zero_grad()
    (back(data()) ** 2).mean().backward()
    (plain(data()) ** 2).mean().backward()
    for (name, p), q in zip(plain.named_parameters(), back.named_parameters(), strict=True):
        assert_close(q[1].grad, p.grad, name)
    again = haloconv.parallelize(back, mesh, shard_inputs=True, gather_outputs=True)
    assert_close(again(data()).detach(), plain(data()).detach(), "output when parallelized again")
    back = haloconv.unparallelize(again)
    assert type(back(data())) is torch.Tensor
    assert not back._forward_hooks and not back._forward_pre_hooks


def copied(world):
    haloconv, mesh, plain, sharded = both(world)
    twin, plain_twin = copy.deepcopy(sharded), copy.deepcopy(plain)
    step(haloconv, plain, sharded, mesh, data(seed=1))
    compare_gradients(plain, sharded)
    assert all(p.grad is None for p in twin.parameters()), "the copy's gradients moved with the original's"
    step(haloconv, plain_twin, twin, mesh, data(seed=2))
    compare_gradients(plain_twin, twin, "the copy's gradient")
    compare_gradients(plain, sharded, "the original's gradient afterwards")
    third = copy.deepcopy(sharded)  # with gradients in place: an average of weights, say
    compare_gradients(plain, third, "the copied gradient")


def cast(world):
    import haloconv

    mesh = mesh_of((world,))
    plain = make().float()
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh)
    plain, sharded = plain.double(), sharded.double()
    step(haloconv, plain, sharded, mesh, data())
    compare_gradients(plain, sharded, "gradient after .double()")
    plain, sharded = plain.to(torch.float32).to("cpu"), sharded.to(torch.float32).to("cpu")
    assert {p.dtype for p in sharded.parameters()} == {torch.float32}
    plain, sharded = plain.to(torch.float64), sharded.to(torch.float64)
    plain.zero_grad()
    sharded.zero_grad()
    step(haloconv, plain, sharded, mesh, data())
    compare_gradients(plain, sharded, "gradient after .to() twice")
    sharded = sharded.half()
    sharded.zero_grad()
    x = data().half()
    out = haloconv.gather(sharded(haloconv.distribute(x, mesh)))
    assert out.dtype == torch.float16
    (out.float() ** 2).mean().backward()
    assert all(
        p.grad.dtype == torch.float16 and all(q.is_replicate() for q in p.grad.placements)
        for p in sharded.parameters()
    )
    plain.half()
    sharded = sharded.to(memory_format=torch.channels_last)
    assert all(torch.isfinite(p.full_tensor()).all() for p in sharded.parameters())


def states(world):
    haloconv, mesh, plain, sharded = both(world)
    step(haloconv, plain, sharded, mesh, data())
    whole = haloconv.full_state_dict(sharded)
    assert list(whole) == list(plain.state_dict())
    for name, value in whole.items():
        assert type(value) is torch.Tensor, f"{name}: {type(value)}"
        assert_close(value, plain.state_dict()[name], name)
    stream = io.BytesIO()
    torch.save(whole, stream)
    stream.seek(0)
    fresh = make(seed=5)
    fresh.load_state_dict(torch.load(stream))  # into an unsplit model
    assert_close(
        fresh(data()).detach(),
        plain(data()).detach(),
        "output of an unsplit model with the sharded one's weights",
    )
    other = haloconv.parallelize(make(seed=9), mesh)
    haloconv.load_full_state_dict(other, plain.state_dict())
    assert_close(
        haloconv.gather(other(haloconv.distribute(data(), mesh))).detach(),
        plain(data()).detach(),
        "output after loading",
    )
    step(haloconv, fresh, other, mesh, data())
    compare_gradients(fresh, other, "gradient after loading")
    another = haloconv.parallelize(make(seed=11), mesh)  # torch's own way, DTensor to DTensor
    another.load_state_dict(sharded.state_dict())
    assert_close(
        haloconv.gather(another(haloconv.distribute(data(), mesh))).detach(),
        plain(data()).detach(),
        "output after load_state_dict",
    )
    bad = dict(plain.state_dict())
    bad["more"] = bad.pop("pw.weight")
    with pytest.raises((KeyError, RuntimeError, ValueError), match=r"pw\.weight|more"):
        haloconv.load_full_state_dict(other, bad)
    whole["pw.weight"].zero_()
    assert not full(sharded.pw.weight.detach()).eq(0).all(), "full_state_dict shares the model's memory"


@pytest.mark.core
@pytest.mark.parametrize("way", [undone, copied, cast, states], ids=lambda way: way.__name__)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_module_afterwards(way, world):
    """Fails when unparallelize, deepcopy, .to()/.half()/.double() or the state dicts lose something."""
    run_ranks(world, way, world)


def parallelized_twice():
    haloconv, mesh, plain, sharded = both(2)
    try:
        again = haloconv.parallelize(sharded, mesh)
    except (ValueError, RuntimeError, TypeError) as error:
        assert "parallelize" in str(error)
        return "refused"
    step(haloconv, plain, again, mesh, data())
    compare_gradients(plain, again)
    return "right"


@pytest.mark.core
def test_parallelize_twice_is_refused_or_harmless():
    """Fails when a second call doubles every gradient."""
    assert len(set(run_ranks(2, parallelized_twice))) == 1


def sharded_loss(world):
    """A dense loss computed on the sharded output, without gather."""
    haloconv, mesh, plain, sharded = both(world)
    x, target = data(), data(channels=4, seed=5)
    want = F.mse_loss(plain(x), target, reduction="sum")
    want.backward()
    got = F.mse_loss(
        sharded(haloconv.distribute(x, mesh)), haloconv.distribute(target, mesh), reduction="sum"
    )
    assert_close(full(got.detach()), want.detach(), "sharded loss")
    got.backward()
    compare_gradients(plain, sharded)


@pytest.mark.core
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_dense_loss(world):
    """Fails when a loss taken on strips, whose sum is a partial one, gives other gradients."""
    run_ranks(world, sharded_loss, world)


def wrapper_with_fsdp():
    """FSDP2 on the dp dim of a 2-D mesh over parallelize on its w dim."""
    import haloconv
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((2, 2), ("dp", "w"))
    plain = make()
    x = data(4)
    mine = x.chunk(2)[mesh.get_local_rank("dp")]
    (plain(x) ** 2).mean().backward()
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh["w"])
    fully_shard(sharded, mesh=mesh["dp"])
    (haloconv.gather(sharded(haloconv.distribute(mine, mesh["w"]))) ** 2).mean().backward()
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert_close(full(q.grad), p.grad, f"gradient of {name}")


def test_fsdp2_on_the_other_mesh_dim():
    """Fails when FSDP2 over data-parallel ranks doesn't get right gradients from the spatial ones."""
    run_ranks(4, wrapper_with_fsdp, timeout=120)


def batch_and_width():
    import haloconv

    mesh = mesh_of((2, 2), ("dp", "w"))
    plain = make()
    x = data(4)
    (plain(x) ** 2).mean().backward()
    model = copy.deepcopy(plain)
    model = haloconv.parallelize(model, mesh, dim=(0, 3))
    (haloconv.gather(model(haloconv.distribute(x, mesh, dim=(0, 3)))) ** 2).mean().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert_replicated(q.grad, p.grad, f"gradient of {name}")


@pytest.mark.core
def test_batch_and_width_by_dim_tuple():
    """Fails when parallelize(dim=(0, 3)) on a 2-D mesh doesn't sum gradients over both mesh dims."""
    run_ranks(4, batch_and_width)
