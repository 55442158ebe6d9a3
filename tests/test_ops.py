"""The ops themselves: opcheck and gradcheck, exact adjoints, errors raised in C.

Most of it runs in a world of one, in a worker process; what only exists between ranks (the adjoint of an
exchange) runs on two to four.
"""

import os

import harness
import pytest
import reference
import torch
import torch.distributed as dist
from harness import mesh_of, raises_on_every_rank, run_ranks, shard
from opcase import count_wrong_calls, require_grad, samples, wrong_calls

pytestmark = pytest.mark.core


# ------------------------------------------------------------------------------------------------ opcheck,
# gradcheck


def check_ops(which):
    count = 0
    for name, op, args in samples():
        if name != which:
            continue
        torch.library.opcheck(op, args)
        if name != "convolution_backward" and name != "halo_reduce":
            torch.library.opcheck(op, tuple(require_grad(a) for a in args))
        count += 1
    return count


@pytest.mark.parametrize("which", ["halo_exchange", "halo_reduce", "convolution", "convolution_backward"])
def test_opcheck(which):
    """Fails when an op's schema, fake kernel or autograd registration isn't what torch's compiler relies
    on."""
    assert run_ranks(1, check_ops, which, timeout=200)[0] >= 5


def check_gradients(which):
    count = 0
    for name, op, args in samples():
        if name != which:
            continue
        tensors = [a.clone().requires_grad_() for a in args if isinstance(a, torch.Tensor)]
        bias = [
            b.clone().requires_grad_()
            for a in args
            if isinstance(a, list) and a and isinstance(a[0], torch.Tensor)
            for b in a
        ]

        def call(*inputs, op=op, args=args, tensors=tensors):
            left, lists = list(inputs[: len(tensors)]), list(inputs[len(tensors) :])
            given = []
            for a in args:
                if isinstance(a, torch.Tensor):
                    given.append(left.pop(0))
                elif isinstance(a, list) and a and isinstance(a[0], torch.Tensor):
                    given.append(lists)
                else:
                    given.append(a)
            return op(*given)

        assert torch.autograd.gradcheck(call, (*tensors, *bias)), (name, args)
        count += 1
    return count


@pytest.mark.parametrize("which", ["halo_exchange", "halo_reduce", "convolution"])
def test_gradcheck(which):
    """Fails when an op's gradient isn't the derivative of its value."""
    assert run_ranks(1, check_gradients, which, timeout=120)[0] >= 5


def second_gradient():
    """Of the convolution: the derivative of the gradient, or an error that says so."""
    outcomes = set()
    for name, op, args in samples():
        if name != "convolution" or args[2]:
            continue
        x, weight = args[0].clone().requires_grad_(), args[1].clone().requires_grad_()
        try:
            assert torch.autograd.gradgradcheck(
                lambda a, b, op=op, args=args: op(a, b, *args[2:]), (x, weight)
            )
            outcomes.add("right")
        except RuntimeError as error:
            assert "Jacobian" not in str(error), error
            assert any(
                word in str(error).lower() for word in ("double", "twice", "second", "differentiable")
            ), error
            outcomes.add("refused")
    return sorted(outcomes)


def test_double_backward_is_right_or_refused():
    """Fails when the gradient of a gradient is a wrong number."""
    assert run_ranks(1, second_gradient, timeout=120)[0] in (["right"], ["refused"])


def registered():
    import haloconv

    assert haloconv
    return sorted({str(s.name) for s in torch._C._jit_get_all_schemas() if s.name.startswith("haloconv::")})


CHECKED_ABOVE = {
    "haloconv::" + name
    for name in (
        "halo_exchange",
        "halo_reduce",
        "exchange",
        "exchange_reduce",
        "all_reduce",
        "convolution",
        "convolution_backward",
    )
}
TRANSPORT = {
    "haloconv::_post",
    "haloconv::_wait",
    "haloconv::_report",
}  # side effects only; the tests between ranks cover them


def test_every_public_op_is_checked():
    """Fails when an op is added that no opcheck covers."""
    names = set(run_ranks(1, registered)[0])
    assert names >= CHECKED_ABOVE
    in_place = {"haloconv::halo_reduce_"}  # against its twin, below; nothing traces it
    assert {n for n in names if not n.startswith("haloconv::_")} <= CHECKED_ABOVE | in_place, names
    assert names >= TRANSPORT


# ------------------------------------------------------------------------------------------------ between
# ranks


def adjoint_between_ranks(seed):
    """<exchange(x), y> = <x, reduce(y)> over all ranks, exactly (integers in float64), and the exchange's
    values."""
    import random

    import haloconv

    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD.group_name
    rng = random.Random(seed)
    for number in range(25):
        periodic = number % 4 == 3
        w = reference.random_window(
            rng, periodic=periodic, transposed=False if periodic else None, biggest=13
        )
        plan = haloconv.plan(*w.plan_args(world)[0], **w.plan_args(world)[1]).ranks[rank]
        window = [w.kernel, w.stride, *w.pad, w.dilation, w.output_padding]
        generator = torch.Generator().manual_seed(1000 * seed + number)
        x = torch.randint(-50, 50, (2, w.size, 2), generator=generator).double()
        begin, end = plan.owned_in
        local = x[:, begin:end].contiguous()
        got = torch.ops.haloconv.halo_exchange(
            local, 1, w.size, window, w.transposed, periodic, 7.0, rank, world, group
        )
        columns = [x[:, i % w.size] if periodic else x[:, i] for i in range(*plan.needed)]
        fill = torch.full((2, 2), 7.0, dtype=torch.float64)
        want = torch.stack([*[fill] * plan.pad_left, *columns, *[fill] * plan.pad_right, fill], 1)[:, :-1]
        assert torch.equal(got, want), (w, rank, got.shape, want.shape)
        y = torch.randint(-50, 50, tuple(got.shape), generator=generator).double()
        back = torch.ops.haloconv.halo_reduce(
            y, 1, w.size, window, w.transposed, periodic, rank, world, group
        )
        assert back.shape == local.shape
        inside = torch.ones(got.shape[1], dtype=torch.bool)
        inside[: plan.pad_left] = False
        inside[got.shape[1] - plan.pad_right :] = False
        sums = torch.stack([(got * y)[:, inside].sum(), (local * back).sum()])
        dist.all_reduce(sums)
        assert sums[0] == sums[1], (w, sums)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_exchange_and_reduce_are_adjoint_exactly(world):
    """Fails when an exchange's values or its adjoint are off by anything at all."""
    for seed in range(4):
        run_ranks(world, adjoint_between_ranks, seed)


def gradcheck_between_ranks():
    """A numerical derivative of the whole sharded convolution, on all ranks together, by central
    differences."""
    import haloconv
    import torch.nn.functional as F
    from torch.distributed.tensor import Shard, distribute_tensor

    world = dist.get_world_size()
    mesh = mesh_of((world,))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 3, 7, dtype=torch.float64, generator=generator)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(1, 2, 2, 4, dtype=torch.float64, generator=generator)

    def value(a, b):
        with haloconv.rules():
            out = F.conv2d(shard(a, mesh, (Shard(3),)), distribute_tensor(b, mesh), stride=2, padding=1)
        return (out.full_tensor() * y).sum().item()

    xs, ws = shard(x, mesh, (Shard(3),)).requires_grad_(), distribute_tensor(weight, mesh).requires_grad_()
    with haloconv.rules():
        F.conv2d(xs, ws, stride=2, padding=1).backward(shard(y, mesh, (Shard(3),)))
    for tensor, grad, which in [(x, xs.grad.full_tensor(), 0), (weight, ws.grad.full_tensor(), 1)]:
        for index in range(0, tensor.numel(), 3):
            step = torch.zeros(tensor.numel(), dtype=torch.float64)
            step[index] = 1e-4
            step = step.view(tensor.shape)
            up = value(x + step, weight) if which == 0 else value(x, weight + step)
            down = value(x - step, weight) if which == 0 else value(x, weight - step)
            assert abs((up - down) / 2e-4 - grad.flatten()[index].item()) < 1e-7


@pytest.mark.parametrize("world", [2, 3])
def test_gradcheck_between_ranks(world):
    """Fails when the sharded convolution's gradient isn't the derivative of its value."""
    run_ranks(world, gradcheck_between_ranks)


# ------------------------------------------------------------------------------------------------ errors
# raised in C


def refuse(number):
    what, call = wrong_calls()[number]
    try:
        call()
    except (RuntimeError, ValueError) as error:
        import re

        assert re.search(what, str(error)), f"{what!r} is not in {str(error)!r}"
        assert os.getpid()
        return str(error)
    raise AssertionError(f"nothing was raised; expected an error about {what}")


def test_errors_raised_in_c_leave_a_living_process():
    """Fails when an error in C ends the process, is swallowed, or doesn't say what is wrong."""
    import haloconv

    assert haloconv
    count = run_ranks(1, count_wrong_calls)[0]
    pids = {harness.pool(1).processes[0].pid}
    for number in range(count):
        run_ranks(1, refuse, number)
        pids.add(harness.pool(1).processes[0].pid)
    assert len(pids) == 1


CHANGES = {  # what one rank passes otherwise, by its place in the arguments after the tensors
    "stride has 5 entries": {0: [1] * 5},
    "padding has 1 entries": {1: [1]},
    "dims has 3 entries": {7: [2, 3, 3]},
    "dims has 9": {7: [9]},
    "ranks has 0 entries": {9: []},
    "group_names has 1 names": {7: [2, 3], 8: [5, 12], 9: [0, 1], 10: [1, 3]},
}


def one_is_refused(backward, changes, biases=0):
    """Rank 1 of 3, between two that wait for its columns, passes what can't be read."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    name = torch.distributed.group.WORLD.group_name
    args = [[1, 1], [1] * 4, [1, 1], False, [0, 0], 1, [0, 0], [3], [4 * world], [rank], [world], name]
    bias = []
    if rank == 1:
        bias = [torch.ones(2)] * biases
        for place, value in changes.items():
            args[place] = value
    x, weight = torch.ones(1, 2, 5, 4), torch.ones(2, 2, 3, 3)
    if backward:
        torch.ops.haloconv.convolution_backward(x, x, weight, *args, True, True, True)
    else:
        torch.ops.haloconv.convolution(x, weight, bias, *args)


@pytest.mark.core
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_arguments_that_cannot_be_read_reach_every_rank(backward, what):
    """Fails when a rank whose arguments are refused before its place in the group is known leaves others waiting."""
    messages = raises_on_every_rank(
        3, one_is_refused, backward, CHANGES[what], kinds=("RuntimeError",), match=what
    )
    assert ["rank 1 reported" in message for message in messages] == [True, False, True], messages
    run_ranks(3, one_is_refused, backward, {})  # the group goes on


@pytest.mark.core
def test_a_second_bias_reaches_every_rank():
    """Fails as the one before, for the tensors."""
    raises_on_every_rank(3, one_is_refused, False, {}, 2, kinds=("RuntimeError",), match="bias")


def reduced_in_place(windows):
    import haloconv

    found = []
    for size, window, transposed, periodic, form in windows:
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        kernel, stride, lo, hi, dilation, extra = window
        plan = haloconv.plan(
            size, world, kernel, stride, (lo, hi), dilation,
            transposed=transposed, output_padding=extra, periodic=periodic,
        ).ranks[rank]  # fmt: skip
        extent = plan.pad_left + plan.needed[1] - plan.needed[0] + plan.pad_right
        grad = torch.randn(2, 3, 4, extent, dtype=torch.float64)
        if form == "sliced":
            grad = torch.randn(2, 3, 4, extent + 2, dtype=torch.float64)[..., 1:-1]
        elif form == "channels_last":
            grad = grad.contiguous(memory_format=torch.channels_last)
        rest = (3, size, window, transposed, periodic, rank, world, torch.distributed.group.WORLD.group_name)
        expected = torch.ops.haloconv.halo_reduce(grad, *rest)
        result = torch.ops.haloconv.halo_reduce_(grad, *rest)
        assert torch.equal(result, expected), (size, window, form)
        assert result.stride() == expected.stride()
        inside = (
            result.numel() > 0 and result.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()
        )
        found.append(inside)
    return found


@pytest.mark.core
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reducing_in_place(world):
    """Fails when the gradient that ends up in its argument's memory is another one than that which does not."""
    windows = [
        (size, window, transposed, periodic, form)
        for size in (1, 2, 7, 12)
        for window, transposed, periodic in (
            ([3, 1, 1, 1, 1, 0], False, False),
            ([3, 2, 1, 1, 1, 0], False, False),
            ([2, 2, 0, 0, 1, 0], False, False),
            ([1, 3, 0, 0, 1, 0], False, False),
            ([5, 1, 4, 0, 1, 0], False, False),
            ([3, 1, 1, 1, 1, 0], False, True),
            ([3, 2, 1, 1, 1, 1], True, False),
        )
        for form in ("dense", "channels_last", "sliced")
        if size + window[2] + window[3] >= window[0] and (not periodic or size > 2)
    ]
    results = run_ranks(world, reduced_in_place, windows)
    assert any(any(found) for found in results)  # memory was used again
    assert not all(all(found) for found in results)  # and not where it cannot be
