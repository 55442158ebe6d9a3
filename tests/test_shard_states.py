"""Parameters, gradients and optimizer states sharded over the ranks that split the images.

The oracle is that of test_parallelize.py: the same float64 model and data, unsplit, trained the same way.
"""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import RankFailure, assert_close, full, mesh_of, run_ranks
from parallelcase import Net, data, make
from torch.utils.checkpoint import checkpoint

STEPS = 3


class Block(nn.Module):
    """ConvNeXt's: norm over channels and Linear on channels-last tensors, a scale that is a parameter of its own."""

    def __init__(self, channels):
        super().__init__()
        self.dw = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.grow, self.shrink = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.5))

    def inner(self, x):
        x = self.shrink(F.gelu(self.grow(self.norm(x.permute(0, 2, 3, 1))))) * self.gamma
        return x.permute(0, 3, 1, 2)

    def forward(self, x):
        return x + self.inner(self.dw(x))


class Next(nn.Module):
    """Sizes that 2 and 3 ranks divide unevenly, a head on the pooled, replicated features, a parameter of the root."""

    block = Block

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 4, stride=4)
        self.blocks = nn.ModuleList(type(self).block(10) for _ in range(3))
        self.bias = nn.Parameter(torch.ones(10, 1, 1))
        self.head = nn.Linear(10, 5)

    def forward(self, x):
        x = self.stem(x) + self.bias
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class InnerCheckpoint(Block):
    """What is recomputed is a part of a block, with a parameter that no submodule's forward reads."""

    def forward(self, x):
        return x + checkpoint(self.inner, self.dw(x), use_reentrant=False)


class ReentrantCheckpoint(Block):
    def forward(self, x):
        return x + checkpoint(self.inner, self.dw(x), use_reentrant=True)


class OuterCheckpoint(Next):
    def forward(self, x):
        x = self.stem(x) + self.bias
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


class InnerNext(Next):
    block = InnerCheckpoint


class ReentrantNext(Next):
    block = ReentrantCheckpoint


class Normed(nn.Module):
    """Batch norm, whose statistics are buffers, group norm, PReLU, a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 6, 3, padding=1), norm, nn.PReLU(6))
            for channels, norm in ((3, nn.BatchNorm2d(6)), (6, nn.GroupNorm(2, 6)), (6, nn.BatchNorm2d(6)))
        )
        self.up = nn.ConvTranspose2d(6, 3, 2, stride=2)

    def forward(self, x):
        for block in self.blocks:
            x = F.max_pool2d(block(x), 3, 2, 1)
        return self.up(x)


class Tied(nn.Module):
    """One weight twice in a group, and a group that runs twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 5, padding=2)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1))]
        )
        self.blocks[0][1].weight = self.blocks[0][0].weight
        self.last = nn.Conv2d(3, 3, 5, padding=2)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.blocks[0](torch.tanh(self.blocks[0](self.first(x)))))


class Frozen(Next):
    """Parameters without a gradient, some and all of a group."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].grow.requires_grad_(False)
        self.bias.requires_grad_(False)


def step(model, optimizer, images, clip=None):
    """The loss and the gradients of one step, full."""
    optimizer.zero_grad()
    out = model(images)
    loss = (full(out) ** 2).mean()
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    gradients = {
        name: None if p.grad is None else full(p.grad).detach().clone()
        for name, p in model.named_parameters()
    }
    optimizer.step()
    return full(loss.detach()), gradients


def compare(plain, sharded, haloconv, mesh, clip=None, distributed=True):
    """Trains both for some steps."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, sharded)]
    for number in range(STEPS):
        images = data(width=34, seed=number)
        want, gradients = step(plain, optimizers[0], images, clip)
        strips = haloconv.distribute(images, mesh) if distributed else images
        got, others = step(sharded, optimizers[1], strips, clip)
        assert_close(got, want, f"loss of step {number}")
        assert list(others) == list(gradients)
        for name, gradient in gradients.items():
            assert (others[name] is None) == (gradient is None), name
            if gradient is not None:
                assert_close(others[name], gradient, f"gradient of {name} in step {number}")
    state = haloconv.full_state_dict(sharded)
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert_close(state[name], value, f"{name} after {STEPS} steps")
    return optimizers[1]


def build(world, kind, grouped, **options):
    import haloconv

    mesh = mesh_of((world,))
    plain = make(kind)
    split = copy.deepcopy(plain)
    groups = list(split.blocks) if grouped else True
    return haloconv, mesh, plain, haloconv.parallelize(split, mesh, shard_states=groups, **options)


def trained(world, kind, grouped):
    haloconv, mesh, plain, sharded = build(world, kind, grouped)
    optimizer = compare(plain, sharded, haloconv, mesh)
    # Each rank holds its part, rounded up to a row, of all that the optimizer keeps.
    for parameter in sharded.parameters():
        rows, whole = -(-parameter.shape[0] // world), parameter.shape[0]
        most = parameter.numel() * rows // whole
        kept = [parameter, *(v for v in optimizer.state[parameter].values() if v.dim() > 0)]
        assert len(kept) == 3 or not parameter.requires_grad
        for tensor in kept:
            assert tensor.to_local().numel() <= most


KINDS = [Next, OuterCheckpoint, InnerNext, ReentrantNext, Normed, Tied, Frozen]


@pytest.mark.core
@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "blocks"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("world", [2, 3])
def test_training(world, kind, grouped):
    """Fails when losses, gradients, running statistics or parameters after some steps of AdamW differ from unsplit, or
    a rank keeps more than its part."""
    run_ranks(world, trained, world, kind, grouped)


def around():
    """Plain images in, plain outputs out, clipped gradients."""
    haloconv, mesh, plain, sharded = build(2, Next, True, shard_inputs=True, gather_outputs=True)
    compare(plain, sharded, haloconv, mesh, clip=0.01, distributed=False)
    plain.eval(), sharded.eval()
    with torch.no_grad():
        out = sharded(data())
    assert type(out) is torch.Tensor
    assert_close(out, plain(data()).detach(), "output under no_grad")


@pytest.mark.core
def test_shard_inputs_gather_outputs_and_clipping():
    """Fails when parallelize's other options, or torch's clipping, do not go with sharded states."""
    run_ranks(2, around)


def states(world):
    haloconv, mesh, plain, sharded = build(world, Normed, True)
    compare(plain, sharded, haloconv, mesh)
    whole = haloconv.full_state_dict(sharded)
    fresh = make(Normed, seed=5)
    fresh.load_state_dict(whole)
    other = haloconv.parallelize(make(Normed, seed=9), mesh, shard_states=True)
    haloconv.load_full_state_dict(other, whole)
    compare(fresh, other, haloconv, mesh)


@pytest.mark.core
@pytest.mark.parametrize("world", [2, 3])
def test_state_dicts(world):
    """Fails when a full state dict does not go out of, or into, a model whose parameters are sharded."""
    run_ranks(world, states, world)


def with_data_parallelism():
    """Images over `w`, the batch over `dp`, states over both."""
    import haloconv

    mesh = mesh_of((2, 2), ("dp", "w"))
    plain = make(Next)
    sharded = haloconv.parallelize(
        copy.deepcopy(plain), mesh["w"], shard_states=True, states_options={"mesh": mesh}
    )
    images = data(4)
    (plain(images) ** 2).mean().backward()
    mine = haloconv.distribute(images.chunk(2)[mesh.get_local_rank("dp")], mesh["w"])
    (full(sharded(mine)) ** 2).mean().backward()
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert_close(full(q.grad), p.grad, f"gradient of {name}")


@pytest.mark.core
def test_states_over_data_parallel_ranks_too():
    """Fails when gradients are not summed over the image's ranks and averaged over the others."""
    run_ranks(4, with_data_parallelism)


def two_spatial_dims(flat):
    import haloconv

    mesh = mesh_of((2, 2), ("h", "w"))
    plain = make(Next)
    options = {"mesh": mesh_of((4,))} if flat else None
    sharded = haloconv.parallelize(
        copy.deepcopy(plain), mesh, dim=(2, 3), shard_states=True, states_options=options
    )
    images = data(height=12)
    (plain(images) ** 2).mean().backward()
    (full(sharded(haloconv.distribute(images, mesh, dim=(2, 3)))) ** 2).mean().backward()
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert_close(full(q.grad), p.grad, f"gradient of {name}")


@pytest.mark.core
@pytest.mark.parametrize("flat", [False, True])
def test_mesh_of_two_spatial_dims(flat):
    """Fails when a gradient that is partial over two mesh dims is multiplied by one of them only, or when states cannot
    be sharded over the ranks of both."""
    run_ranks(4, two_spatial_dims, flat)


def mixed_precision():
    """Parameters gathered in bfloat16: what a layer sees, and the gradient's error."""
    import haloconv
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = mesh_of((2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = make(Next)
    split = copy.deepcopy(plain).float()
    sharded = haloconv.parallelize(
        split, mesh, shard_states=list(split.blocks), states_options={"mp_policy": policy}
    )
    seen = []
    split.stem.register_forward_hook(lambda module, args, out: seen.append((module.weight.dtype, out.dtype)))
    images = data()
    (plain(images) ** 2).mean().backward()
    (full(sharded(haloconv.distribute(images.float(), mesh))).float() ** 2).mean().backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert q.grad.dtype == torch.float32
        error = (full(q.grad).double() - p.grad).abs().max() / p.grad.abs().max()
        assert error < 0.1, f"{name}: {error}"  # bfloat16 has 8 bits, through 15 layers


@pytest.mark.core
def test_mixed_precision():
    """Fails when FSDP2's mixed precision does not reach the layers, or its gradients are far off."""
    run_ranks(2, mixed_precision)


def refused(how):
    import haloconv

    mesh, model = mesh_of((2,)), make(Next)
    if how == "a module of another model":
        haloconv.parallelize(model, mesh, shard_states=[nn.Linear(2, 2)])
    elif how == "no module":
        haloconv.parallelize(model, mesh, shard_states=["blocks"])
    elif how == "an option of another kind":
        haloconv.parallelize(model, mesh, shard_states=True, states_options={"ignored_params": set()})
    elif how == "options without states":
        haloconv.parallelize(model, mesh, states_options={})
    elif how == "one parameter in two groups":
        model.blocks[1].norm.weight = model.blocks[0].norm.weight
        haloconv.parallelize(model, mesh, shard_states=model.blocks)
    elif how == "undoing":
        haloconv.unparallelize(haloconv.parallelize(model, mesh, shard_states=True))
    elif how == "twice":
        haloconv.parallelize(haloconv.parallelize(model, mesh, shard_states=True), mesh)


REFUSALS = {
    "a module of another model": "none of the module's",
    "no module": "list of submodules",
    "an option of another kind": "ignored_params",
    "options without states": "states_options is {}",
    "one parameter in two groups": "'blocks.0.norm.weight' and 'blocks.1.norm.weight' are one parameter",
    "undoing": "cannot be undone",
    "twice": "parallelized already",
}


@pytest.mark.core
@pytest.mark.parametrize("how", REFUSALS)
def test_refused(how):
    """Fails when what cannot be right is taken."""
    with pytest.raises(RankFailure, match=REFUSALS[how]) as raised:
        run_ranks(2, refused, how)
    assert all({"ValueError", "TypeError"} & set(kinds) for kinds, *_ in raised.value.errors.values())


def too_few_ranks():
    import haloconv

    mesh = mesh_of((2, 2), ("dp", "w"))
    haloconv.parallelize(make(Net), mesh["w"], shard_states=True, states_options={"mesh": mesh["dp"]})


@pytest.mark.core
def test_states_mesh_without_the_images_ranks_is_refused():
    """Fails when gradients' parts would be left unsummed without a word."""
    with pytest.raises(RankFailure, match="would not be summed"):
        run_ranks(4, too_few_ranks)
