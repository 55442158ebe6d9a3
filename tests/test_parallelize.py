"""`parallelize` and its companions: a model trained sharded is the model trained unsplit, in every way people
train.

One oracle: the same float64 model and data, unsplit and sharded; losses, outputs and every gradient equal at
1e-9. Hooks assert that activations stay sharded and parameters, gradients and optimizer moments are
Replicate.
"""

import copy

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
from parallelcase import Net, both, compare_gradients, data, make, step

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


@pytest.mark.parametrize(
    "world, way",
    [
        (1, "snippet"),
        (2, "snippet"),
        (2, "plain tensors"),
        (2, "classic"),
        *[pytest.param(1, way, marks=pytest.mark.long) for way in ("plain tensors", "classic")],
    ],
)
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
