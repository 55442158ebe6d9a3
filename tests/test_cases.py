"""One named test for each fault that people have reported of systems like this one, by its number in the
project's list.

Each docstring says what a failure means. Values are float64 and equal to the unsplit computation at 1e-9
unless a test says why not.
"""

import harness
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from convcase import Block, grid, pairs, run
from harness import assert_close, assert_shards, check_same, mesh_of, run_ranks, shard

pytestmark = pytest.mark.core

W, H = (3,), (2,)


# ------------------------------------------------------------------------------------------------ 1


def block_gradients(world, width, dim):
    import copy

    import haloconv
    from torch.distributed.tensor import Shard, distribute_module

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    plain = Block().double()
    x = torch.randn(2, 3, 16, width, dtype=torch.float64)
    if dim == 2:
        x = x.mT.contiguous()
    by_rules = distribute_module(copy.deepcopy(plain), mesh)
    with haloconv.rules():
        check_same(mesh, (Shard(dim),), plain, x, by_rules, params=pairs(plain, by_rules))
    plain.zero_grad()
    swapped = haloconv.parallelize(copy.deepcopy(plain), mesh, dim=dim)
    check_same(mesh, (Shard(dim),), plain, x, swapped, params=pairs(plain, swapped))


@pytest.mark.parametrize("world, width", [(1, 32), (2, 64), (3, 64), (4, 64), (4, 32)])
def test_case_01_every_parameter_before_a_padded_conv_gets_its_gradient(world, width):
    """Fails when layers before a padded convolution get no gradient, or a wrong one: training is silently
    wrong."""
    run_ranks(world, block_gradients, world, width, 3)


def torch_alone():
    """What torch's DTensor does with a padded width-sharded convolution: (largest error, placements, input
    gradient is None)."""
    import haloconv
    from torch.distributed.tensor import Shard, distribute_tensor

    haloconv.disable_rules()
    mesh = mesh_of((2,))
    torch.manual_seed(0)
    x = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    want = F.conv2d(x, weight, padding=1)
    xs = shard(x, mesh, (Shard(3),)).requires_grad_()
    got = F.conv2d(xs, distribute_tensor(weight, mesh), padding=1)
    local = got.to_local()
    # what the label says this rank holds, against what it does hold
    expected = harness.local_part(want, mesh, got.placements) if local.shape != want.shape else want
    error = float("inf") if local.shape != expected.shape else (local - expected).abs().max().item()
    lost = None
    if error < 1e-9:
        got.to_local().sum().backward()
        lost = xs.grad is None
    return error, [str(p) for p in got.placements], lost


def test_case_01_torch_alone_is_wrong():
    """Fails when torch has fixed its own sharded convolution (good news: the README's claim then needs its
    release)."""
    release = torch.__version__.split("+")[0]
    if release in ("2.13.0", "2.14.1"):
        results = run_ranks(2, torch_alone)
        assert all(error > 0.01 for error, _, _ in results), (
            f"torch {release} gave the right output: {results}"
        )
    elif release.startswith("2.11."):
        results = run_ranks(2, torch_alone)
        assert all(lost for _, _, lost in results), f"torch {release} gave an input gradient: {results}"
    else:
        pytest.skip(f"what torch {release} does alone hasn't been recorded; known: 2.11, 2.13.0, 2.14.1")


# ------------------------------------------------------------------------------------------------ 2, 3


@pytest.mark.parametrize("world", [2, 3, 4])
def test_case_02_any_spatial_dim(world):
    """Fails when a tensor sharded on H has its exchange done on W."""
    run_ranks(world, block_gradients, world, 64, 2)
    for route in ("rules", "parallelize", "layer"):
        run(grid((9, 6), 3, 1, 1, 1, (world,), H, route=route))
        run(grid((7, 5, 4), 3, 1, 2, 1, (world,), (2,), route=route))
        run(grid((4, 9, 5), (1, 3, 5), (0, 1, 2), 1, 1, (world,), (3,), route=route))


@pytest.mark.parametrize("ranks", [[2, 3], [1, 3], [0, 2, 3]], ids=str)
@pytest.mark.parametrize("route", ["rules", "parallelize", "layer"])
def test_case_03_subgroup(ranks, route):
    """Fails when global ranks are used as peers: a hang, or another group's pixels."""
    run(grid((4, 10), 5, 2, 1, 1, ranks, W, route=route), world=4)


def out_of_order(ranks):
    from convcase import check

    try:
        return check(grid((4, 10), 5, 2, 1, 1, ranks, W))
    except (ValueError, RuntimeError) as error:
        assert "mesh" in str(error) and "order" in str(error), error
        return "refused"


@pytest.mark.parametrize("ranks", [[3, 1], [1, 0], [2, 0, 1]], ids=str)
def test_case_03_mesh_out_of_order(ranks):
    """Fails when a mesh whose ranks don't ascend, so that a rank's place on the mesh isn't its place in the
    group, is neither right nor refused by name."""
    assert len(set(run_ranks(max(ranks) + 1, out_of_order, ranks)) - {None}) == 1


def data_parallel_and_spatial(layout):
    """Gradients of a dp x w mesh, the dp part averaged by hand, against the whole batch unsplit."""
    import copy

    import haloconv

    mesh = mesh_of(layout, ("dp", "w"))
    torch.manual_seed(0)
    plain = Block().double()
    x = torch.randn(4, 3, 16, 32, dtype=torch.float64)
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh["w"])
    (plain(x) ** 2).mean().backward()
    mine = x.chunk(2)[mesh.get_local_rank("dp")]
    out = haloconv.gather(sharded(haloconv.distribute(mine, mesh["w"])))
    assert_close(out, plain(mine), "output")
    (out**2).mean().backward()
    for name, parameter in sharded.named_parameters():
        grad = parameter.grad.to_local().clone()
        dist.all_reduce(grad, group=mesh.get_group("dp"))
        assert_close(grad / 2, dict(plain.named_parameters())[name].grad, f"gradient of {name}")


@pytest.mark.parametrize("layout", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=str)
def test_case_03_data_parallel_times_spatial(layout):
    """Fails when the spatial groups of a 2-D mesh disturb each other, or reduce gradients over the wrong
    ranks."""
    run_ranks(4, data_parallel_and_spatial, layout)


# ------------------------------------------------------------------------------------------------ 4, 5


@pytest.mark.parametrize("k, s, p", [(3, 2, 1), (7, 2, 3), (3, 1, 0), (5, 1, 1), (4, 1, 1), (4, 1, 2)])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_case_04_halo_is_not_half_the_kernel(k, s, p, world):
    """Fails when the halo is taken as (k-1)/2 or (k-s)/2 whatever the stride, the padding and the shard's
    start."""
    for size in (16, 17, 24):
        run(grid((3, size), (3, k), (1, p), (1, s), 1, (world,), W))


@pytest.mark.parametrize("p", [0, 1, 2])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_case_05_dilation(p, world):
    """Fails when dilation isn't part of the halo's width."""
    run(grid((3, 13), 3, (2, p), 1, 2, (world,), W))
    run(grid((13, 3), 3, (p, 2), 1, 2, (world,), H, route="parallelize"))


def unread_columns():
    """k2 s3: every third input is read by nobody; its gradient is exactly zero, and present."""
    import haloconv
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of((3,))
    torch.manual_seed(0)
    x = torch.randn(1, 1, 1, 13, dtype=torch.float64)
    weight = torch.randn(1, 1, 1, 2, dtype=torch.float64)
    xs = shard(x, mesh, (Shard(3),)).requires_grad_()
    with haloconv.rules():
        out = F.conv2d(xs, distribute_tensor(weight, mesh), stride=(1, 3))
        out.sum().backward()
    plain = x.clone().requires_grad_()
    F.conv2d(plain, weight, stride=(1, 3)).sum().backward()
    assert_shards(xs.grad, plain.grad, (Shard(3),), "input gradient")
    return xs.grad.full_tensor().flatten().tolist()


def test_case_05_negative_halo():
    """Fails when inputs that no window reads get no gradient (a shape error) or somebody else's."""
    for grad in run_ranks(3, unread_columns):
        assert [i for i, value in enumerate(grad) if value == 0.0] == [2, 5, 8, 11, 12]
    for world in (2, 3, 4):
        run(grid((2, 13), (1, 2), 0, (1, 3), 1, (world,), W))
        run(grid((2, 13), (1, 1), 0, (1, 4), 1, (world,), W, route="parallelize"))


# ------------------------------------------------------------------------------------------------ 9


def labels(world):
    import haloconv
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 10, dtype=torch.float64)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    ws = distribute_tensor(weight, mesh).requires_grad_()
    with haloconv.rules():
        for placement in (Shard(2), Shard(3), Replicate()):
            xs = shard(x, mesh, (placement,)).requires_grad_()
            out = F.conv2d(xs, ws, padding=1)
            assert out.placements == (placement,)
            assert_shards(out, F.conv2d(x, weight, padding=1), (placement,), "output")
            assert_close(out.full_tensor(), F.conv2d(x, weight, padding=1), "what the label says, gathered")
            (grad,) = torch.autograd.grad(out, ws, shard(torch.ones_like(x), mesh, (placement,)))
            # whatever the gradient's label is, reducing it by the label gives the same right value on every
            # rank
            reduced = grad.redistribute(placements=[Replicate()]).to_local()
            plain = weight.clone().requires_grad_()
            F.conv2d(x, plain, padding=1).sum().backward()
            assert_close(reduced, plain.grad, f"weight gradient with {placement}")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_case_09_labels_are_true(world):
    """Fails when a result is labelled Replicate (or Shard) and the ranks hold something else."""
    run_ranks(world, labels, world)


# ------------------------------------------------------------------------------------------------ 10


def circular(world, mode, kernel, dim):
    import copy

    import haloconv
    from torch.distributed.tensor import Shard

    mesh = mesh_of((world,))
    torch.manual_seed(0)
    plain = nn.Conv2d(2, 3, kernel, padding=kernel // 2, padding_mode=mode, dtype=torch.float64)
    x = torch.randn(2, 2, 12, 13, dtype=torch.float64)
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh, dim=dim)
    check_same(mesh, (Shard(dim),), plain, x, sharded, params=pairs(plain, sharded))


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_case_10_circular_padding(world, mode):
    """Fails when, with two ranks, left and right neighbour (one peer) are mixed up; or when another padding
    mode pads the inner edges."""
    for kernel in (3, 5):
        for dim in (2, 3):
            run_ranks(world, circular, world, mode, kernel, dim)


# ------------------------------------------------------------------------------------------------ 11, 12


@pytest.mark.parametrize("size, world", [(5, 4), (20, 8), (9, 4), (1, 3), (2, 4), (3, 2)])
@pytest.mark.parametrize("route", ["rules", "parallelize", "layer"])
def test_case_11_sizes_that_do_not_divide(size, world, route):
    """Fails when output or input sizes that the ranks don't divide (empty and one-column shards) are cut
    wrongly."""
    run(grid((2, size), 3, 1, 1, 1, (world,), W, route=route))
    run(grid((2, size), 3, 1, (1, 2), 1, (world,), W, route=route))
    run(grid((size, 2), 4, (2, 2), (3, 1), 1, (world,), H, route=route))
    run(grid((2, size), 3, 1, (1, 2), 1, (world,), W, transposed=True, output_padding=(0, 1), route=route))


@pytest.mark.parametrize("route", ["rules", "parallelize", "layer"])
def test_case_12_kernel_wider_than_the_neighbours_shard(route):
    """Fails when only the direct neighbours are asked for pixels."""
    run(grid((2, 9), 7, 3, 1, 1, (8,), W, route=route))
    run(grid((2, 10), 5, 2, (1, 2), 1, (4,), W, route=route))
    run(grid((2, 7), 7, 3, 1, 1, (4,), W, route=route))
    run(grid((6,), 11, 5, 1, 1, (4,), (2,), route=route))
