"""`haloconv.nn.Linear` on tensors sharded in other dims than the last: equal to unsplit, silent, in all its ways."""

import copy

import pytest
import torch
from harness import full, mesh_of, run_ranks, shard
from rulecase import random
from torch.distributed.tensor import DTensor, Replicate, Shard

pytestmark = pytest.mark.core


def pair(mesh, bias, plain_parameters=False, dtype=torch.float64):
    """torch's layer, and haloconv's with the same numbers, in replicated DTensors or plain."""
    import haloconv

    torch.manual_seed(0)
    plain = torch.nn.Linear(5, 3, bias=bias, dtype=dtype)
    layer = haloconv.nn.Linear(5, 3, bias=bias, dtype=dtype)
    layer.load_state_dict(copy.deepcopy(plain.state_dict()))
    if not plain_parameters:
        for name, parameter in list(layer.named_parameters()):
            value = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim)
            setattr(layer, name, torch.nn.Parameter(value))
    return plain, layer


def same(got, want, what, **tolerance):
    torch.testing.assert_close(
        full(got) if isinstance(got, DTensor) else got, want, msg=lambda text: f"{what}: {text}", **tolerance
    )


def gradients(shape, dims):
    """Several shapes (an empty shard too), with and without a bias, parameters of both kinds, twice over."""
    import haloconv

    mesh, placements = mesh_of(shape), [Shard(dim) for dim in dims]
    for size in ((2, 4, 7, 5), (1, 1, 1, 5), (2, 3, 2, 5)):
        for bias, plain_parameters, frozen in ((True, False, ""), (False, True, ""), (True, False, "weight")):
            plain, layer = pair(mesh, bias, plain_parameters)
            for module in (plain, layer):
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(name != frozen)
            x, cotangent = random(size), random((*size[:-1], 3), 1)
            a, b = x.clone().requires_grad_(), shard(x, mesh, placements).requires_grad_()
            for _ in range(2):
                want = plain(a)
                want.backward(cotangent)
                haloconv.reset_comm_stats()
                got = layer(b)
                got.backward(shard(cotangent, mesh, placements))
                assert haloconv.comm_stats()["messages"] == 0
            what = f"{size}, {placements}, bias {bias}, plain {plain_parameters}, frozen '{frozen}'"
            assert got.placements == tuple(placements) and got.stride() == want.stride(), what
            same(got, want, what)
            same(b.grad, a.grad, what)
            for one, other in zip(layer.parameters(), plain.parameters()):
                assert (one.grad is None) == (other.grad is None), what
                if one.grad is not None:
                    same(one.grad, other.grad, what)


@pytest.mark.parametrize(
    "shape, dims", [((1,), (2,)), ((2,), (2,)), ((3,), (1,)), ((2, 2), (0, 2)), ((2, 2), (2, 1))]
)
def test_equal_to_unsplit(shape, dims):
    """Fails when a gradient is lost, summed twice or not at all, or lies elsewhere than its tensor."""
    run_ranks(torch.Size(shape).numel(), gradients, shape, dims)


def double_backward():
    mesh, placements = mesh_of((2,)), [Shard(1)]
    plain, layer = pair(mesh, True)
    x = random((2, 5, 5))
    found = []
    for module, tensor in ((plain, x.clone()), (layer, shard(x, mesh, placements))):
        tensor.requires_grad_()
        (grad,) = torch.autograd.grad(module(tensor).pow(3).sum(), tensor, create_graph=True)
        penalty = grad.square().sum()
        penalty.backward()
        found.append([penalty.detach(), tensor.grad, module.weight.grad, module.bias.grad])
    for want, got in zip(*found):
        same(got, want, "double backward")


def test_double_backward():
    """Fails when a gradient penalty through the layer differs."""
    run_ranks(2, with_rules, double_backward)


def with_rules(function):
    import haloconv

    with haloconv.rules():
        function()


def autocast():
    mesh, placements = mesh_of((2,)), [Shard(1)]
    plain, layer = pair(mesh, True, dtype=torch.float32)
    x = random((2, 6, 5)).float()
    a, b = x.clone().requires_grad_(), shard(x, mesh, placements).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = plain(a), layer(b)
        assert got.dtype == want.dtype == torch.bfloat16
    same(got, want, "output", rtol=0, atol=0)
    want.float().square().sum().backward()
    got.float().square().backward(torch.ones_like(got, dtype=torch.float32))
    bound = {"rtol": 2**-6, "atol": 2**-6}  # bfloat16 has 8 bits; sums of 12 rows in another order
    same(b.grad, a.grad, "input", **bound)
    assert layer.weight.grad.dtype == torch.float32
    same(layer.weight.grad, plain.weight.grad, "weight", **bound)
    same(layer.bias.grad, plain.bias.grad, "bias", **bound)


def test_autocast():
    run_ranks(2, autocast)
