"""What doesn't fit is refused on every rank, before anything is sent, by a message that names argument,
value, expectation and rank.

`raises_on_every_rank` also checks that the same processes can communicate afterwards. The last tests are
about one rank alone being wrong, or dying: the others must notice within seconds.
"""

import os
import signal
import time

import harness
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness import RankFailure, mesh_of, raises_on_every_rank, run_ranks, shard

pytestmark = pytest.mark.core

KINDS = ("ValueError", "TypeError", "RuntimeError")
RANK = r"(?i)rank\W{0,3}{rank}\b"
SECONDS = 20  # "within seconds": gloo's own limit, which a plain hang would wait for, is 120 here


def convolve(
    x_shape=(1, 4, 6, 10),
    w_shape=(4, 4, 3, 3),
    b_shape=(4,),
    *,
    x_dtype=torch.float64,
    w_dtype=torch.float64,
    b_dtype=torch.float64,
    dim=3,
    transposed=False,
    w_mesh=None,
    w_shard=None,
    w_device="cpu",
    w_plain=False,
    route="rules",
    **options,
):
    import haloconv
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = mesh_of((2,))
    x = shard(torch.ones(x_shape).to(x_dtype), mesh, (Shard(dim),))
    other = mesh_of(w_mesh) if w_mesh else mesh
    places = (Replicate(),) * other.ndim if w_shard is None else (Shard(w_shard),)
    weight = DTensor.from_local(
        torch.ones(w_shape, device=w_device).to(w_dtype), other, places, run_check=False
    )
    if w_plain:
        weight = weight.to_local()
    bias = (
        None
        if b_shape is None
        else DTensor.from_local(
            torch.ones(b_shape).to(b_dtype), other, (Replicate(),) * other.ndim, run_check=False
        )
    )
    if w_plain:
        bias = None
    nd = len(w_shape) - 2
    name = f"conv_transpose{nd}d" if transposed else f"conv{nd}d"
    if route == "layer":
        kind = getattr(haloconv.nn, f"ConvTranspose{nd}d" if transposed else f"Conv{nd}d")
        groups = options.pop("groups", 1)
        layer = kind(x_shape[1], x_shape[1], w_shape[2:], **options)
        layer.groups = groups
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return layer(x).shape
    with haloconv.rules():
        return getattr(F, name)(x, weight, bias, **options).shape


ARGUMENTS = [
    # (what's wrong, patterns of the message, arguments)
    ("stride zero", ["stride", "0"], dict(stride=0)),
    ("stride zero on the other dim", ["stride", "0"], dict(stride=(0, 1))),
    ("stride negative", ["stride", "-2"], dict(stride=-2)),
    ("dilation zero", ["dilation", "0"], dict(dilation=0)),
    ("padding negative", ["padding", "-1"], dict(padding=-1)),
    ("padding negative on the other dim", ["padding", "-1"], dict(padding=(-1, 1))),
    ("groups don't divide the input's channels", ["groups", "3"], dict(groups=3)),
    (
        "groups don't divide the output's channels",
        ["groups", "2"],
        dict(groups=2, w_shape=(3, 2, 3, 3), b_shape=(3,)),
    ),
    ("groups zero", ["groups", "0"], dict(groups=0)),
    ("channels don't fit", ["(?i)channel|weight", "5"], dict(w_shape=(4, 5, 3, 3))),
    ("bias doesn't fit", ["bias", "7"], dict(b_shape=(7,))),
    ("bias has two dims", ["bias"], dict(b_shape=(4, 1))),
    ("kernel larger than the padded input", ["(?i)kernel", "11"], dict(w_shape=(4, 4, 3, 11))),
    ("kernel larger on the other dim", ["(?i)kernel", "9"], dict(w_shape=(4, 4, 9, 3))),
    ("kernel of size zero", ["(?i)kernel|weight", "0"], dict(w_shape=(4, 4, 3, 0))),
    ("weight and input of different dtypes", ["(?i)dtype|type", "float32"], dict(w_dtype=torch.float32)),
    ("bias of another dtype", ["(?i)dtype|type", "float"], dict(b_dtype=torch.float32)),
    (
        "integers",
        ["(?i)dtype|type|float", "int64"],
        dict(x_dtype=torch.int64, w_dtype=torch.int64, b_dtype=torch.int64),
    ),
    (
        "bool",
        ["(?i)dtype|type|float", "bool"],
        dict(x_dtype=torch.bool, w_dtype=torch.bool, b_dtype=torch.bool),
    ),
    ("weight on another mesh", ["(?i)mesh"], dict(w_mesh=(1, 2))),
    ("output_padding too large", ["output_padding", "2"], dict(transposed=True, stride=2, output_padding=2)),
    ("output_padding negative", ["output_padding", "-1"], dict(transposed=True, stride=2, output_padding=-1)),
    (
        "transposed, channels don't fit",
        ["(?i)channel|weight", "5"],
        dict(transposed=True, w_shape=(5, 4, 3, 3)),
    ),
    ("transposed, no output left", ["(?i)padding|output|size"], dict(transposed=True, padding=40)),
    ("stride has too many numbers", ["stride"], dict(stride=(1, 1, 1))),
    ("padding has too few numbers", ["padding"], dict(padding=(1, 1, 1))),
]


@pytest.mark.parametrize("route", ["rules", "layer"])
@pytest.mark.parametrize(
    "patterns, arguments", [case[1:] for case in ARGUMENTS], ids=[case[0] for case in ARGUMENTS]
)
def test_argument_is_named(patterns, arguments, route):
    """Fails when a wrong argument is accepted, or refused without its name, its value and the rank."""
    if route == "rules" and "b_dtype" in arguments:
        patterns = patterns[:1]  # torch.conv2d itself refuses this one, before any rule
    else:
        patterns = [RANK, *patterns]
    raises_on_every_rank(2, call_convolve, {**arguments, "route": route}, kinds=KINDS, match=patterns)


def call_convolve(arguments):
    return convolve(**arguments)


def test_the_good_call_is_good():
    """Fails when the calls above would be refused for another reason than the one they are about."""
    for route in ("rules", "layer"):
        assert run_ranks(2, call_convolve, {"route": route, "padding": 1}) == [(1, 4, 6, 10)] * 2


def wrong_local(mode):
    """Each rank's local part isn't what the chunk rule gives for the global size."""
    import haloconv
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = mesh_of((2,))
    rank = dist.get_rank()
    width = {"uneven": (4, 6)[rank], "both too wide": 6, "both too narrow": 3}[mode]
    x = DTensor.from_local(
        torch.ones(1, 2, 4, width),
        mesh,
        [Shard(3)],
        run_check=False,
        shape=torch.Size((1, 2, 4, 10)),
        stride=(80, 40, 10, 1),
    )
    weight = DTensor.from_local(torch.ones(2, 2, 3, 3), mesh, [Replicate()], run_check=False)
    with haloconv.rules():
        F.conv2d(x, weight, padding=1)


@pytest.mark.parametrize("mode", ["uneven", "both too wide", "both too narrow"])
def test_local_tensor_that_is_not_its_shard(mode):
    """Fails when a strip of the wrong width is convolved as if it were right."""
    raises_on_every_rank(2, wrong_local, mode, kinds=KINDS, match=[RANK, "10"])


def call_public(which):
    import haloconv
    from torch.distributed.tensor import Shard

    mesh = mesh_of((2,))
    grid = mesh_of((1, 2))
    x = torch.ones(1, 3, 4, 10)
    calls = {
        "distribute: dim": lambda: haloconv.distribute(x, mesh, dim=4),
        "distribute: negative dim": lambda: haloconv.distribute(x, mesh, dim=-5),
        "distribute: dim type": lambda: haloconv.distribute(x, mesh, dim="w"),
        "distribute: dims and mesh": lambda: haloconv.distribute(x, mesh, dim=(2, 3)),
        "distribute: dim twice": lambda: haloconv.distribute(x, grid, dim=(3, -1)),
        "distribute: one dim on a 2-D mesh": lambda: haloconv.distribute(x, mesh_of((2, 1)), dim=(3,)),
        "distribute: tensor": lambda: haloconv.distribute([1, 2, 3], mesh),
        "distribute: mesh": lambda: haloconv.distribute(x, "cpu"),
        "distribute_local: width": lambda: haloconv.distribute_local(x, mesh, size=11),
        "distribute_local: size": lambda: haloconv.distribute_local(x, mesh, size=-1),
        "distribute_local: dim": lambda: haloconv.distribute_local(x, mesh, dim=7, size=20),
        "shard_range: size": lambda: haloconv.shard_range(-1, mesh),
        "shard_range: mesh": lambda: haloconv.shard_range(10, None),
        "gather: plain": lambda: haloconv.gather([x]),
        "parallelize: module": lambda: haloconv.parallelize(lambda t: t, mesh),
        "parallelize: mesh": lambda: haloconv.parallelize(nn.Conv2d(3, 3, 3), 2),
        "parallelize: dims and mesh": lambda: haloconv.parallelize(nn.Conv2d(3, 3, 3), mesh, dim=(2, 3)),
        "parallelize: dim type": lambda: haloconv.parallelize(nn.Conv2d(3, 3, 3), mesh, dim=1.5),
        "distribute: DTensor": lambda: haloconv.distribute(haloconv.distribute(x, mesh), mesh),
        "distribute: meta": lambda: haloconv.distribute(x.to("meta"), mesh),
        "distribute: nested": lambda: haloconv.distribute(torch.nested.nested_tensor([x[0], x[0, :2]]), mesh),
        "distribute: quantized": lambda: haloconv.distribute(
            torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), mesh
        ),
        "parallelize: shard_inputs": lambda: haloconv.parallelize(
            nn.Conv2d(3, 3, 3), mesh, shard_inputs="yes"
        ),
        "parallelize: gather_outputs": lambda: haloconv.parallelize(
            nn.Conv2d(3, 3, 3), mesh, gather_outputs=1
        ),
        "parallelize: broadcast": lambda: haloconv.parallelize(nn.Conv2d(3, 3, 3), mesh, broadcast=None),
        "parallelize: states_options": lambda: haloconv.parallelize(
            nn.Conv2d(3, 3, 3), mesh, shard_states=True, states_options=3
        ),
        "parallelize: DataParallel": lambda: haloconv.parallelize(nn.DataParallel(nn.Conv2d(3, 3, 3)), mesh),
        "parallelize: TorchScript": lambda: haloconv.parallelize(torch.jit.script(nn.Conv2d(3, 3, 3)), mesh),
        "load_full_state_dict: list": lambda: haloconv.load_full_state_dict(nn.Conv2d(3, 3, 3), []),
        "MaxPool2d: padding": lambda: haloconv.nn.MaxPool2d(2, padding=2)(haloconv.distribute(x, mesh)),
        "AvgPool2d: divisor": lambda: haloconv.nn.AvgPool2d(2, divisor_override=0)(
            haloconv.distribute(x, mesh)
        ),
        "ReflectionPad2d: padding": lambda: haloconv.nn.ReflectionPad2d(10)(haloconv.distribute(x, mesh)),
        "PixelShuffle: channels": lambda: haloconv.nn.PixelShuffle(2)(haloconv.distribute(x, mesh)),
        "Upsample: size": lambda: haloconv.nn.Upsample(size=0)(haloconv.distribute(x, mesh)),
        "unparallelize: plain module": lambda: haloconv.unparallelize("model"),
        "full_state_dict: type": lambda: haloconv.full_state_dict(3),
        "Conv2d: input on another mesh": lambda: haloconv.parallelize(nn.Conv2d(3, 3, 3), mesh)(
            haloconv.distribute(x, grid, dim=(2, 3))
        ),
    }
    if which is None:
        return list(calls)
    assert Shard
    return calls[which]()


PUBLIC = {
    "distribute: dim": ["dim", "4"],
    "distribute: negative dim": ["dim", "-5"],
    "distribute: dim type": ["dim", "w"],
    "distribute: dims and mesh": ["dim", r"\(2, 3\)"],
    "distribute: dim twice": ["dim", "3"],
    "distribute: one dim on a 2-D mesh": ["dim"],
    "distribute: tensor": ["(?i)tensor", "list"],
    "distribute: mesh": ["(?i)mesh", "str|cpu"],
    "distribute_local: width": ["11"],
    "distribute_local: size": ["size", "-1"],
    "distribute_local: dim": ["dim", "7"],
    "shard_range: size": ["size", "-1"],
    "shard_range: mesh": ["(?i)mesh", "None"],
    "gather: plain": ["(?i)tensor", "list"],
    "parallelize: module": ["(?i)module", "function"],
    "parallelize: mesh": ["(?i)mesh", "int|2"],
    "parallelize: dims and mesh": ["dim", r"\(2, 3\)"],
    "parallelize: dim type": ["dim", "float|1.5"],
    "distribute: DTensor": ["tensor is a DTensor", RANK],
    "distribute: meta": ["tensor is a meta", RANK],
    "distribute: nested": ["tensor is a nested", RANK],
    "distribute: quantized": ["tensor is a quantized", RANK],
    "parallelize: shard_inputs": ["shard_inputs", "yes", RANK],
    "parallelize: gather_outputs": ["gather_outputs", "1", RANK],
    "parallelize: broadcast": ["broadcast", "None", RANK],
    "parallelize: states_options": ["states_options", "3", RANK],
    "parallelize: DataParallel": ["module", "DataParallel", RANK],
    "parallelize: TorchScript": ["module", "TorchScript", RANK],
    "load_full_state_dict: list": ["sd", "list", RANK],
    "MaxPool2d: padding": ["padding", "2", RANK],
    "AvgPool2d: divisor": ["divisor_override", "0", RANK],
    "ReflectionPad2d: padding": ["padding", "10", RANK],
    "PixelShuffle: channels": ["upscale_factor", "2", RANK],
    "Upsample: size": ["size", "0", RANK],
    "unparallelize: plain module": ["(?i)module", "str|model"],
    "full_state_dict: type": ["(?i)module|model", "int|3"],
    "Conv2d: input on another mesh": ["(?i)mesh"],
}


@pytest.mark.parametrize("which", PUBLIC)
def test_public_functions_check_their_arguments(which):
    """Fails when a public function takes what doesn't fit, or its error doesn't say what is wrong."""
    raises_on_every_rank(2, call_public, which, kinds=KINDS, match=PUBLIC[which])


def groups(which):
    """The exchange with a group that doesn't exist (any more)."""
    import haloconv
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    x = shard(torch.ones(1, 2, 4, 10), mesh, (Shard(3),))
    weight = distribute_tensor(torch.ones(2, 2, 3, 3), mesh, [Replicate()])
    group = dist.new_group([0, 1])
    if which == "dead":
        mesh = DeviceMesh.from_group(group, "cpu")
        x = shard(torch.ones(1, 2, 4, 10), mesh, (Shard(3),))
        weight = distribute_tensor(torch.ones(2, 2, 3, 3), mesh, [Replicate()])
        dist.destroy_process_group(group)
    with haloconv.rules():
        F.conv2d(x, weight, padding=1)


def test_dead_group():
    """Fails when a destroyed process group is a crash or a hang instead of an error that says so."""
    raises_on_every_rank(2, groups, "dead", kinds=KINDS, match=["(?i)group"])


# ------------------------------------------------------------------------------------------------ one rank
# alone (case 15)


def one_bad_rank(how, bad):
    """One rank's strip is wrong; all ranks convolve."""
    import haloconv
    from torch.distributed.tensor import DTensor, Replicate, Shard

    world = dist.get_world_size()
    mesh = mesh_of((world,))
    mine = dist.get_rank() == bad
    shape, dtype = [1, 2, 4, 5], torch.float32
    if mine and how == "width":
        shape[3] = 4
    if mine and how == "channels":
        shape[1] = 3
    if mine and how == "batch":
        shape[0] = 2
    if mine and how == "dtype":
        dtype = torch.float64
    x = DTensor.from_local(
        torch.ones(shape, dtype=dtype),
        mesh,
        [Shard(3)],
        run_check=False,
        shape=torch.Size((1, 2, 4, 5 * world)),
        stride=(40 * world, 20 * world, 5 * world, 1),
    )
    weight = DTensor.from_local(torch.ones(2, 2, 3, 3), mesh, [Replicate()], run_check=False)
    start = time.monotonic()
    try:
        with haloconv.rules():
            out = F.conv2d(x, weight, padding=1)
            for _ in range(world):  # the news travels one neighbour an exchange; a network has many
                out = F.conv2d(out, weight, padding=1)
    finally:
        took = time.monotonic() - start
        assert took < SECONDS, f"took {took:.1f} s"


@pytest.mark.parametrize("world, bad", [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("how", ["width", "channels", "batch", "dtype"])
def test_case_15_one_bad_rank_is_every_ranks_error(how, world, bad):
    """Fails when one rank raises and the others wait until the process group gives up."""
    messages = raises_on_every_rank(
        world, one_bad_rank, how, bad, kinds=KINDS, timeout=SECONDS + 15, usable=False
    )
    assert "rank" in messages[bad]


def as_many_bytes(what):
    """The ranks do not mean the same, but each sends as many bytes as the other expects."""
    import haloconv
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of((2,))
    mine = dist.get_rank() == 1
    width = 34 if mine and what == "width" else 33  # 17 columns on the first rank both times
    x = haloconv.distribute(torch.ones(1, 2, 4, width), mesh)
    weight = distribute_tensor(torch.ones(2, 1, 3, 3), mesh)
    with haloconv.rules():
        if what == "op" and mine:
            F.conv2d(x, weight, padding=1, groups=2)
        elif what == "dtype":
            F.max_pool2d(x.to(torch.bfloat16 if mine else torch.float16), 3, 1, 1)
        else:
            F.max_pool2d(x, 3, 1, 1)


@pytest.mark.parametrize("what", ["width", "op", "dtype"])
def test_messages_of_the_right_length_are_not_taken_for_what_they_are_not(what):
    """Fails when ranks that disagree on a size, an op or a dtype get values that are wrong without a word."""
    raises_on_every_rank(2, as_many_bytes, what, kinds=KINDS, match="disagree|reported", usable=False)


def uneven_shards_of_a_padded_conv():
    import haloconv
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of((4,))
    x = shard(torch.ones(1, 1, 3, 9), mesh, (Shard(3),)).requires_grad_()
    with haloconv.rules():
        F.conv2d(x, distribute_tensor(torch.ones(1, 1, 3, 3), mesh), padding=1).sum().backward()


def test_case_15_uneven_shards_do_not_hang():
    """Fails when uneven shards make a rank wait for pixels that nobody sends."""
    run_ranks(4, uneven_shards_of_a_padded_conv, timeout=20)


def killed(bad, when):
    import haloconv
    from torch.distributed.tensor import Shard, distribute_tensor

    world = dist.get_world_size()
    mesh = mesh_of((world,))
    x = shard(torch.ones(1, 2, 4, 5 * world), mesh, (Shard(3),)).requires_grad_()
    weight = distribute_tensor(torch.ones(2, 2, 3, 3), mesh).requires_grad_()
    with haloconv.rules():
        out = F.conv2d(x, weight, padding=1)
        if when == "backward":
            grad = shard(torch.ones(out.shape), mesh, (Shard(3),))
        if dist.get_rank() == bad:
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "backward":
            out.backward(grad)
        else:
            for _ in range(3):
                out = F.conv2d(out, weight, padding=1)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_killed_rank_is_noticed(when):
    """Fails when a rank that dies leaves its neighbours waiting."""
    start = time.monotonic()
    replies, running = harness.pool(2).run(killed, (1, when), SECONDS)
    took = time.monotonic() - start
    try:
        assert not running, "the surviving rank hangs"
        assert replies[1][0] == "died"
        assert replies[0][0] == "error" and "RuntimeError" in replies[0][1][0], replies[0]
        assert took < SECONDS
    finally:
        harness.discard(2)


def raises_here_only(bad):
    """An error in the user's own code on one rank, between convolutions."""
    import haloconv
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of((2,))
    x = shard(torch.ones(1, 2, 4, 10), mesh, (Shard(3),))
    weight = distribute_tensor(torch.ones(2, 2, 3, 3), mesh)
    with haloconv.rules():
        F.conv2d(x, weight, padding=1)
        if dist.get_rank() == bad:
            raise KeyError("mine")


def test_error_in_user_code_is_reported_by_its_own_rank():
    """Fails when a rank's own exception is hidden by the exchange."""
    with pytest.raises(RankFailure, match="KeyError: 'mine'"):
        run_ranks(2, raises_here_only, 1)
