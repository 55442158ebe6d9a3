"""Batch, instance, group, layer and RMS norms of sharded tensors against unsplit ones: values, gradients, buffers."""

import copy
import functools
import itertools

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
from rulecase import check, random
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


REPLICATED = (Replicate(), Replicate())  # left to torch


def layouts(world, ndim):
    for shape, dims in LAYOUTS[world]:
        if all(dim is None or dim < ndim for dim in dims):
            yield mesh_of(shape), tuple(Replicate() if dim is None else Shard(dim) for dim in dims)


def as_format(x, channels_last):
    if not channels_last:
        return x
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


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
        if want.is_contiguous(memory_format=form) and got.to_local().numel() and placements != REPLICATED:
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


def compare_modules(world, cases, options):
    """cases: (name, module, shape). Returns how many were compared."""
    count = 0
    for name, module, shape in cases:
        for mesh, placements in layouts(world, len(shape)):
            for last in (False, True) if len(shape) in (4, 5) else (False,):
                x = as_format(random(shape), last)
                try:
                    compare(mesh, placements, copy.deepcopy(module), x, **options)
                except Exception as error:
                    where = f"{name} on {shape}, {tuple(mesh.shape)}, {placements}, channels_last={last}"
                    raise AssertionError(f"{where}: {error}") from error
                count += 1
    return count


def modules(world, kind):
    return compare_modules(world, CASES[kind](), {})


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
