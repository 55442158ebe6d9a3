"""What is kept of a rule's calls (_rules/_memo.py) answers only the calls that it was kept of; and gradients of
parameters that broadcast stay Partial until they are reduced together."""

import pytest
import torch
import torch.nn.functional as F
from harness import full, mesh_of, run_ranks, shard
from rulecase import random
from torch.distributed.tensor import Partial, Replicate, Shard

pytestmark = pytest.mark.core


def kept_calls():
    from haloconv._rules import _memo

    return len(_memo._calls)


def look_alikes(world):
    """Calls that differ in one thing each, one after another, twice."""
    import haloconv

    mesh, placed = mesh_of((world,)), [Shard(3)]
    x, grad = random((2, 4, 3, 7)), random((2, 4, 3, 7), 1)
    last = x.to(memory_format=torch.channels_last)
    calls = [
        lambda x: F.leaky_relu(x, 0.1),
        lambda x: F.leaky_relu(x, 0.2),
        lambda x: F.hardtanh(x, -1, 1),
        lambda x: F.hardtanh(x, -1.0, 0.5),
        lambda x: F.hardtanh_(x.clone(), -1.0, 0.5),
        lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)),
        lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,), eps=1e-2),
    ]
    with haloconv.rules():
        tensors = [x, last, x.float(), x[:1], x[..., :5]]
        pairs = [(shard(tensor, mesh, placed), tensor) for tensor in tensors]
        kept = [kept_calls()]
        for _ in range(3):
            for call in calls:
                for split, tensor in pairs:
                    got, want = call(split), call(tensor)
                    torch.testing.assert_close(
                        full(got), want
                    )  # vector and scalar code differ in the last bit
                    if tensor.size(0) > 1:  # else several strides mean the same
                        assert got.stride() == want.stride()
            kept.append(kept_calls())
        assert kept[0] < kept[1] and kept[2] == kept[3], kept
        for approximate in ("none", "tanh", "none"):
            got = torch.ops.aten.gelu_backward(
                shard(grad, mesh, placed), shard(last, mesh, placed), approximate=approximate
            )
            want = torch.ops.aten.gelu_backward(grad, last, approximate=approximate)
            torch.testing.assert_close(full(got), want)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_look_alikes(world):
    """Fails when a kept call answers one with another scalar, memory format, dtype or shape; or when none is kept."""
    run_ranks(world, look_alikes, world)


def not_kept():
    """A call whose argument has to be moved first is worked out each time."""
    import haloconv

    mesh = mesh_of((2,))
    x, grad = random((2, 4, 3, 7)), random((2, 4, 3, 7), 1)
    with haloconv.rules():
        for _ in range(2):
            got = torch.ops.aten.gelu_backward(shard(grad, mesh, [Replicate()]), shard(x, mesh, [Shard(3)]))
            torch.testing.assert_close(full(got), torch.ops.aten.gelu_backward(grad, x))


def test_a_call_that_moves_an_argument_is_not_kept():
    run_ranks(2, not_kept)


# ---- parameters that broadcast ----


class Scaled(torch.nn.Module):
    """A scale and a shift per channel, by hand, in the forms that programs use; and a gate that is no parameter."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(random((4,), 1))
        self.shift = torch.nn.Parameter(random((1, 4, 1, 1), 2))
        self.rows = torch.nn.Parameter(random((1, 1, 3, 1), 3))
        self.one = torch.nn.Parameter(random((), 4))

    def forward(self, x):
        x = x * self.scale.reshape(1, -1, 1, 1) + self.shift
        x = x * self.scale[:, None, None] * self.rows + self.one
        gate = x.mean((2, 3), keepdim=True).sigmoid()
        return x * gate


def parameters_that_broadcast(world, channels_last):
    import haloconv

    mesh = mesh_of((world,))
    x = random((2, 4, 3, 7))
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    plain = Scaled()
    split = haloconv.parallelize(Scaled(), mesh)
    (plain(x) ** 2).sum().backward()
    loss = (split(haloconv.distribute(x, mesh)) ** 2).sum()
    assert loss.placements == (Replicate(),)  # what the program sums is summed
    haloconv.reset_comm_stats()
    loss.backward()
    stats = haloconv.comm_stats()
    for (name, got), want in zip(split.named_parameters(), plain.parameters()):
        assert got.grad.placements == (Replicate(),), name
        torch.testing.assert_close(full(got.grad), want.grad, rtol=1e-12, atol=1e-12)
    # One exchange, for the gate's gradient; those of the parameters travel together.
    found = {op: (counts["exchanges"], counts["all_reduces"]) for op, counts in stats["by_op"].items()}
    if world > 1:
        assert found == {"exchange": (1, 0), "gradients": (0, 1)}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_parameters_that_broadcast(world, channels_last):
    """Fails when a scale's gradient is wrong, or reduced by an exchange of its own."""
    run_ranks(world, parameters_that_broadcast, world, channels_last)


def asked_for():
    """autograd.grad gives such a gradient Partial, and one that autograd kept on the way is the same."""
    import haloconv

    mesh = mesh_of((2,))
    x, scale = random((2, 4, 3, 7)), random((4,), 1).requires_grad_()
    (want,) = torch.autograd.grad((x * scale.view(1, -1, 1, 1)).square().sum(), scale)
    with haloconv.rules():
        split = shard(scale.detach(), mesh, [Replicate()])
        other = split.clone().requires_grad_()
        (shard(x, mesh, [Shard(3)]) * other.view(1, -1, 1, 1)).square().sum().backward()
        assert other.grad.placements == (Replicate(),)  # of no parameter
        torch.testing.assert_close(full(other.grad), want)
        split = torch.nn.Parameter(split)
        viewed = split.view(1, -1, 1, 1)
        viewed.retain_grad()
        loss = (shard(x, mesh, [Shard(3)]) * viewed).square().sum()
        (got,) = torch.autograd.grad(loss, split, retain_graph=True)
        assert got.placements == (Partial(),)
        torch.testing.assert_close(full(got), want)
        (once_more,) = torch.autograd.grad(loss, split, create_graph=True)
        torch.testing.assert_close(full(once_more.detach()), want)
        viewed.grad = None  # the hook has added up
        loss.backward()
        torch.testing.assert_close(full(viewed.grad).flatten(), want)
        torch.testing.assert_close(full(split.grad), want)


def test_gradients_that_are_asked_for():
    run_ranks(2, asked_for)
