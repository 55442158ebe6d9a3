"""`parallelize` and its companions: a model trained sharded is the model trained unsplit, in every way people
train.

One oracle: the same float64 model and data, unsplit and sharded; losses, outputs and every gradient equal at
1e-9. Hooks assert that activations stay sharded and parameters, gradients and optimizer moments are
Replicate.
"""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness import (
    assert_close,
    assert_replicated,
    assert_shards,
    full,
    mesh_of,
    raises_on_every_rank,
    run_ranks,
)


class Net(nn.Module):
    """A small ConvNet with a stride, a depthwise 7x7 across the seam, a shortcut and a transposed
    convolution."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.dw = nn.Conv2d(8, 8, 7, padding=3, groups=8, bias=False)
        self.pw = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x):
        x = F.gelu(self.stem(x))
        x = x + self.pw(F.gelu(self.dw(x))) * self.scale
        return self.up(x)


def make(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind().double()


def data(batch=2, height=6, width=18, channels=3, seed=1):
    return torch.randn(
        batch, channels, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def compare_gradients(plain, sharded, what="gradient"):
    others = dict(sharded.named_parameters())
    assert list(others) == [name for name, _ in plain.named_parameters()]
    for name, p in plain.named_parameters():
        got = others[name].grad
        if p.grad is None:
            assert got is None, f"{what} of {name}: expected None"
            continue
        assert got is not None, f"{what} of {name}: None"
        assert_replicated(got, p.grad, f"{what} of {name}")


def both(world, kind=Net, dim=-1, **options):
    import haloconv

    mesh = mesh_of((world,))
    plain = make(kind)
    return haloconv, mesh, plain, haloconv.parallelize(copy.deepcopy(plain), mesh, dim=dim, **options)


def step(haloconv, plain, sharded, mesh, x, dim=-1):
    """One forward and backward of both; returns both losses."""
    want = (plain(x) ** 2).mean()
    want.backward()
    got = (haloconv.gather(sharded(haloconv.distribute(x, mesh, dim=dim))) ** 2).mean()
    got.backward()
    assert_close(full(got.detach()), want.detach(), "loss")


# ------------------------------------------------------------------------------------------------ the
# snippet, on a real model


def convnext(width=64, dtype=torch.float64, seed=0):
    import timm

    torch.manual_seed(seed)
    return timm.create_model("convnext_atto", num_classes=5, drop_path_rate=0.0).to(dtype)


class Watch:
    """Hooks on every module: activations with a width are sharded on it (channels-last ones on their dim
    2)."""

    def __init__(self, model):
        self.images = 0
        for name, module in model.named_modules():
            module.register_forward_hook(lambda module, args, out, name=name: self.see(name, [*args, out]))

    def see(self, name, tensors):
        from torch.distributed.tensor import DTensor, Shard

        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 4 and min(tensor.shape[2:]) > 1:
                assert isinstance(tensor, DTensor), f"{name}: a plain activation"
                assert tensor.placements in ((Shard(3),), (Shard(2),)), (
                    f"{name}: activation {tensor.placements}"
                )
                self.images += 1


def check_training_state(model, optimizer):
    from torch.distributed.tensor import DTensor

    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and all(q.is_replicate() for q in p.placements), (
            f"{name}: {p.placements}"
        )
        assert isinstance(p.grad, DTensor) and all(q.is_replicate() for q in p.grad.placements), (
            f"{name}.grad: {p.grad.placements}"
        )
        for key, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor) and value.dim():
                assert isinstance(value, DTensor) and all(q.is_replicate() for q in value.placements), (
                    f"{name}: {key}"
                )


def snippet(world, way):
    """Two AdamW steps of timm's convnext_atto, unsplit and sharded."""
    import haloconv
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = mesh_of((world,))
    plain = convnext()
    images = data(2, 32, 64)
    target = torch.tensor([1, 3])
    criterion = nn.CrossEntropyLoss()
    copied = copy.deepcopy(plain)
    if way == "snippet":
        model = haloconv.parallelize(copied, mesh)

        def forward():
            return haloconv.gather(model(haloconv.distribute(images, mesh)))

    elif way == "plain tensors":
        model = haloconv.parallelize(copied, mesh, shard_inputs=True, gather_outputs=True)

        def forward():
            out = model(images)
            assert type(out) is torch.Tensor
            return out

    else:
        haloconv.enable_rules()
        model = distribute_module(copied, mesh)

        def forward():
            return model(distribute_tensor(images, mesh, [Shard(3)])).full_tensor()

    watch = Watch(model)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for number in range(2):
        want = criterion(plain(images), target)
        theirs.zero_grad()
        want.backward()
        got = criterion(forward(), target)
        ours.zero_grad()
        got.backward()
        assert_close(full(got.detach()), want.detach(), f"loss of step {number}")
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert_close(full(q.grad), p.grad, f"gradient of {name} in step {number}", rtol=1e-8)
        theirs.step()
        ours.step()
        if way != "classic":
            check_training_state(model, ours)
    assert watch.images > 50
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert_close(
            full(q.detach()), p.detach(), f"{name} after two steps", atol=1e-7
        )  # Adam divides by the size of a gradient
    return True


@pytest.mark.parametrize("way", ["snippet", "plain tensors", "classic"])
@pytest.mark.parametrize("world", [1, 2])
def test_design_snippet_on_convnext(world, way):
    """Fails when the README's few lines, or the classic DTensor way, don't train timm's ConvNeXt as
    unsplit."""
    pytest.importorskip("timm")
    run_ranks(world, snippet, world, way, timeout=240)


# ------------------------------------------------------------------------------------------------ parameters


def seeded_differently(world):
    import haloconv

    mesh = mesh_of((world,))
    rank = dist.get_rank()
    model = haloconv.parallelize(make(seed=rank), mesh)
    plain = make(seed=0)
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        x = data(seed=number)
        ours.zero_grad()
        theirs.zero_grad()
        step(haloconv, plain, model, mesh, x)
        compare_gradients(plain, model)
        ours.step()
        theirs.step()
        check_training_state(model, ours)
    return [(name, p.detach().to_local().tolist()) for name, p in model.named_parameters()]


@pytest.mark.core
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_seeded_differently_train_identically(world):
    """Fails when parameters aren't broadcast from the group's rank 0, or drift apart: bitwise equal on all
    ranks."""
    results = run_ranks(world, seeded_differently, world)
    assert all(result == results[0] for result in results)


def broadcast_in_subgroup(layout):
    """rank 0 of the group, not of the world, is where parameters come from."""
    import haloconv

    mesh = mesh_of(layout, ("dp", "w"))
    model = haloconv.parallelize(make(seed=dist.get_rank()), mesh["w"])
    first = torch.tensor(layout)[mesh.get_local_rank("dp")][0].item()
    for name, p in make(seed=first).named_parameters():
        assert_replicated(dict(model.named_parameters())[name].detach(), p.detach(), name)


@pytest.mark.core
def test_broadcast_comes_from_the_groups_first_rank():
    """Fails when a subgroup's parameters come from global rank 0."""
    run_ranks(4, broadcast_in_subgroup, [[0, 2], [1, 3]])
    run_ranks(4, broadcast_in_subgroup, [[0, 1], [2, 3]])


def without_broadcast(what):
    import haloconv

    mesh = mesh_of((2,))
    model = make()
    with torch.no_grad():
        if what == "parameter" and dist.get_rank() == 1:
            model.dw.weight[3, 0, 0, 0] += 1e-3
        if what == "buffer" and dist.get_rank() == 1:
            model.scale += 1
    if what == "shape" and dist.get_rank() == 1:
        model.pw = nn.Conv2d(8, 8, 3, padding=1).double()
    sharded = haloconv.parallelize(model, mesh, broadcast=False)
    if what == "nothing":
        plain = make()
        step(haloconv, plain, sharded, mesh, data())
        compare_gradients(plain, sharded)


@pytest.mark.core
def test_broadcast_false_checks():
    """Fails when ranks that disagree train on, or when the error doesn't say which parameter differs."""
    run_ranks(2, without_broadcast, "nothing")
    raises_on_every_rank(
        2, without_broadcast, "parameter", kinds=("ValueError", "RuntimeError"), match=r"dw\.weight"
    )
    raises_on_every_rank(2, without_broadcast, "buffer", kinds=("ValueError", "RuntimeError"), match="scale")
    raises_on_every_rank(
        2, without_broadcast, "shape", kinds=("ValueError", "RuntimeError"), match=r"pw\.weight"
    )


def swapped_classes():
    import haloconv
    from torch.distributed.tensor import DTensor

    class Own(nn.Conv2d):
        """A subclass with its own forward, as timm's Conv2dSame: left to the rules."""

        def forward(self, x):
            return F.conv2d(x, self.weight * 2, self.bias, padding=1)

    class WithOwn(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Conv2d(3, 4, 3, padding=1)
            self.own = Own(4, 4, 3, padding=1)
            self.one_d = nn.Conv1d(1, 1, 1)

        def forward(self, x):
            return self.own(self.one(x))

    mesh = mesh_of((2,))
    plain = WithOwn().double()
    keys = list(plain.state_dict())
    harness_seed = copy.deepcopy(plain)
    sharded = haloconv.parallelize(harness_seed, mesh)
    assert sharded is harness_seed, "parallelize works in place and returns the module"
    assert type(sharded.one) is haloconv.nn.Conv2d and isinstance(sharded.one, nn.Conv2d)
    assert type(sharded.one_d) is haloconv.nn.Conv1d
    assert type(sharded.own) is Own
    assert list(sharded.state_dict()) == keys
    for name, p in sharded.named_parameters():
        assert isinstance(p, nn.Parameter) and isinstance(p, DTensor), name
        assert all(q.is_replicate() for q in p.placements) and p.device_mesh == mesh
    if dist.get_rank() == 0:
        state = plain.state_dict()
    else:
        state = None
    state = [state]
    dist.broadcast_object_list(state, 0)
    plain.load_state_dict(state[0])
    step(haloconv, plain, sharded, mesh, data())
    compare_gradients(
        nn.ModuleDict({"one": plain.one, "own": plain.own}),
        nn.ModuleDict({"one": sharded.one, "own": sharded.own}),
    )


@pytest.mark.core
def test_classes_keys_and_types():
    """Fails when exact torch types aren't swapped, subclasses with their own forward are, or state_dict keys
    change."""
    run_ranks(2, swapped_classes)


# ------------------------------------------------------------------------------------------------ plain
# tensors in a forward


class CoordConv(nn.Module):
    """Makes its own coordinate planes, as CoordConv and many detection heads do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(5, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 2, 5, padding=2)

    def forward(self, x):
        n, _, h, w = x.shape
        across = torch.linspace(-1, 1, w, dtype=x.dtype).view(1, 1, 1, w).expand(n, 1, h, w)
        down = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(n, 1, h, w)
        x = torch.cat([x, across, down], 1)
        x = self.conv(x) + torch.linspace(0, 1, w, dtype=x.dtype)
        return self.out(torch.relu(x))


class WeightedLoss(nn.Module):
    """Returns the loss itself: an error weighted by latitude and longitude, as weather models do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 5, padding=2)

    def forward(self, x):
        error = (self.conv(x) - x) ** 2
        latitude = torch.cos(torch.linspace(-1.5, 1.5, x.shape[-2], dtype=x.dtype)).view(-1, 1)
        longitude = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        return (error * latitude * longitude).sum()


def own_tensors(world, kind, dim, width):
    haloconv, mesh, plain, sharded = both(world, kind, dim)
    x = data(width=width)
    want = plain(x)
    got = haloconv.gather(sharded(haloconv.distribute(x, mesh, dim=dim)))
    assert_close(got.detach(), want.detach(), "output")
    (want**2).sum().backward()
    (got**2).sum().backward()
    compare_gradients(plain, sharded)


@pytest.mark.core
@pytest.mark.parametrize("kind", [CoordConv, WeightedLoss])
@pytest.mark.parametrize("world, width", [(2, 18), (3, 18), (3, 17)])
@pytest.mark.parametrize("dim", [-1, 2])
def test_plain_tensors_made_in_a_forward_are_replicated(kind, world, width, dim):
    """Fails when a linspace or a weight map made inside a forward is an error, or is taken as this rank's
    strip."""
    run_ranks(world, own_tensors, world, kind, dim, width)


# ------------------------------------------------------------------------------------------------ a backbone
# alone


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Net()
        self.head = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.LazyLinear(5))

    def forward(self, x):
        return self.head(self.backbone(x))


def backbone_alone(world, train_input):
    import haloconv

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    plain = Detector()
    plain(torch.zeros(2, 3, 6, 18))
    plain = plain.double()
    model = copy.deepcopy(plain)
    haloconv.parallelize(model.backbone, mesh, shard_inputs=True, gather_outputs=True)
    x = data()
    mine, theirs = x.clone().requires_grad_(train_input), x.clone().requires_grad_(train_input)
    seen = []
    model.head[0].register_forward_hook(lambda module, args, out: seen.extend([type(args[0]), type(out)]))
    assert_close(model(mine).detach(), plain(theirs).detach(), "output")
    (model(mine) ** 2).sum().backward()
    (plain(theirs) ** 2).sum().backward()
    assert set(seen) == {torch.Tensor}, "the head saw something else than plain tensors"
    compare_gradients(plain.backbone, model.backbone)
    for (name, p), q in zip(plain.head.named_parameters(), model.head.parameters(), strict=True):
        assert type(q.grad) is torch.Tensor
        assert_close(q.grad, p.grad, f"gradient of head.{name}")
    if train_input:
        assert_close(mine.grad, theirs.grad, "gradient of the plain images")


@pytest.mark.core
@pytest.mark.parametrize("train_input", [False, True], ids=["images", "images with gradient"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_backbone_alone_under_a_plain_head(world, train_input):
    """Fails when a backbone's gradients are multiplied by the number of ranks, or the rest of the model sees
    DTensors."""
    run_ranks(world, backbone_alone, world, train_input)


def plain_in_front():
    """A plain stem in front of a sharded trunk: its gradient passes through distribute's backward."""
    import haloconv

    mesh = mesh_of((2,))
    plain = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1).double(), make())
    with torch.no_grad():
        for p in plain[0].parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
    model = copy.deepcopy(plain)
    haloconv.parallelize(model[1], mesh, shard_inputs=True, gather_outputs=True)
    x = data()
    (model(x) ** 2).sum().backward()
    (plain(x) ** 2).sum().backward()
    for (name, p), q in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert_close(full(q[1].grad), p.grad, f"gradient of {name}")


@pytest.mark.core
def test_plain_layers_in_front_of_a_sharded_trunk():
    """Fails when what comes before the sharded part gets only this rank's strip of its gradient."""
    run_ranks(2, plain_in_front)


def gather_and_distribute(world):
    """gather and distribute are differentiable, and gather's gradient isn't multiplied."""
    import haloconv
    from torch.distributed.tensor import Shard

    mesh = mesh_of((world,))
    x = data(width=7)
    for dim in (-1, 2, 3, 0):
        where = dim % 4
        xs = haloconv.distribute(x, mesh, dim=dim)
        assert_shards(xs, x, (Shard(where),), "distribute")
        assert_close(haloconv.gather(xs), x, "gather")
        xs = xs.detach().requires_grad_()
        weight = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        (haloconv.gather(xs) * weight).sum().backward()
        assert_shards(xs.grad, weight, (Shard(where),), "gradient through gather")
        begin, end = haloconv.shard_range(x.shape[where], mesh)
        local = x.narrow(where, begin, end - begin)
        assert_shards(
            haloconv.distribute_local(local, mesh, dim=dim, size=x.shape[where]),
            x,
            (Shard(where),),
            "distribute_local",
        )
    assert type(haloconv.gather(haloconv.distribute(x, mesh))) is torch.Tensor


@pytest.mark.core
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_distribute_and_gather(world):
    """Fails when a strip is cut at the wrong column or its gradient is scaled."""
    run_ranks(world, gather_and_distribute, world)


def local_without_size(world):
    """distribute_local without a size: the slabs' own sum, where they are what the rule says."""
    import haloconv
    from torch.distributed.tensor import Shard

    mesh = mesh_of((world,))
    x = data(width=4 * world)
    local = x.chunk(world, 3)[dist.get_rank()].contiguous()
    assert_shards(haloconv.distribute_local(local, mesh), x, (Shard(3),), "distribute_local")


@pytest.mark.core
def test_distribute_local_infers_the_size():
    """Fails when the global size of even slabs isn't found."""
    run_ranks(3, local_without_size, 3)


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
