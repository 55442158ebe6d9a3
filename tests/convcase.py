"""A sharded convolution as data, and the worker-side function that checks one against the unsplit
convolution.

Used by the listed grids, the named cases and the random ones. A case says: the convolution, the input's
sizes, the mesh and which tensor dim each mesh dim shards, and by which of the library's routes the sharded
one is called.
"""

import contextlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import assert_close, assert_replicated, check_same, mesh_of

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_T = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
ROUTES = ("rules", "parallelize", "layer")


@dataclass(frozen=True)
class Case:
    sizes: tuple  # spatial sizes of the input; their number is 1, 2 or 3
    kernel: tuple
    stride: tuple
    padding: tuple
    dilation: tuple
    mesh: object  # a shape (tuple), or nested lists of global ranks
    shards: tuple  # per mesh dim: the tensor dim it shards (0 is the batch), or None for Replicate
    batch: int = 1
    channels: tuple = (2, 2)
    groups: int = 1
    bias: bool = True
    transposed: bool = False
    output_padding: tuple = ()
    channels_last: bool = False
    route: str = "rules"
    submesh: str | None = (
        None  # name of the dim of a 2-D mesh (dims "a" and "b") to use alone: the other dim's groups are independent
    )
    seed: int = 0

    def __str__(self):
        return "-".join(
            [
                ("T" if self.transposed else "") + "x".join(map(str, self.sizes)),
                "k" + "x".join(map(str, self.kernel)),
                "s" + "x".join(map(str, self.stride)),
                "p" + "x".join(map(str, self.padding)),
                "d" + "x".join(map(str, self.dilation)),
                f"mesh{self.mesh}{self.submesh or ''}".replace(" ", ""),
                f"shards{self.shards}".replace(" ", ""),
                f"n{self.batch}c{self.channels[0]}x{self.channels[1]}g{self.groups}",
                "cl" if self.channels_last else "cf",
                self.route,
            ]
        )


def grid(sizes, kernel, padding, stride, dilation, mesh, shards=None, **more):
    """A Case from numbers written as in CASES.md: an int stands for the same number in every dim."""
    nd = len(sizes)

    def spread(value):
        return tuple(value) if isinstance(value, tuple) else (value,) * nd

    if shards is None:
        shards = tuple(range(2 + nd - len(mesh), 2 + nd))
    if more.get("transposed"):
        more["output_padding"] = spread(more.get("output_padding", 0))
    return Case(
        tuple(sizes),
        spread(kernel),
        spread(stride),
        spread(padding),
        spread(dilation),
        mesh,
        tuple(shards),
        **more,
    )


def seen_from_group(case):
    """The mesh of this case on this rank, and a number that is the same on the ranks that work together."""
    if case.submesh is None:
        return mesh_of(case.mesh), 0
    whole = mesh_of(case.mesh, ("a", "b"))
    coordinate = whole.get_coordinate()
    return whole[case.submesh], 1 + coordinate[0 if case.submesh == "b" else 1]


def build(case, seed):
    """(unsplit layer, input), float64, the same wherever the seed is the same."""
    import torch.nn as nn

    nd = len(case.sizes)
    generator = torch.Generator().manual_seed(seed)
    kinds = {
        1: (nn.Conv1d, nn.ConvTranspose1d),
        2: (nn.Conv2d, nn.ConvTranspose2d),
        3: (nn.Conv3d, nn.ConvTranspose3d),
    }
    options = dict(
        kernel_size=case.kernel,
        stride=case.stride,
        padding=case.padding,
        dilation=case.dilation,
        groups=case.groups,
        bias=case.bias,
        dtype=torch.float64,
    )
    if case.transposed:
        options["output_padding"] = case.output_padding
    layer = kinds[nd][case.transposed](*case.channels, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    x = torch.randn((case.batch, case.channels[0], *case.sizes), dtype=torch.float64, generator=generator)
    if case.channels_last and nd > 1:
        x = x.contiguous(memory_format={2: torch.channels_last, 3: torch.channels_last_3d}[nd])
    grad = torch.randn(layer(x).shape, dtype=torch.float64, generator=generator)
    if case.channels_last and nd > 1:
        grad = grad.contiguous(memory_format={2: torch.channels_last, 3: torch.channels_last_3d}[nd])
    return layer, x, grad


def functional(case, x, weight, bias):
    nd = len(case.sizes)
    if case.transposed:
        return CONV_T[nd](
            x, weight, bias, case.stride, case.padding, case.output_padding, case.groups, case.dilation
        )
    return CONV[nd](x, weight, bias, case.stride, case.padding, case.dilation, case.groups)


def check(case):
    """On one rank: this case by its route against the unsplit layer. Returns True, or None where this rank
    isn't in the mesh."""
    import copy

    import haloconv
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    mesh, group = seen_from_group(case)
    if mesh.get_coordinate() is None:
        return None
    placements = tuple(Replicate() if dim is None else Shard(dim) for dim in case.shards)
    layer, x, grad = build(case, seed=1000 * case.seed + group)
    context = contextlib.nullcontext()
    if case.route == "rules":
        names = [name for name, _ in layer.named_parameters()]
        sharded = {
            name: distribute_tensor(p.detach(), mesh).requires_grad_() for name, p in layer.named_parameters()
        }
        assert names == list(sharded)
        context = haloconv.rules()

        def call(xs):
            return functional(case, xs, sharded["weight"], sharded.get("bias"))

    elif case.route == "parallelize":
        assert None not in case.shards
        call = haloconv.parallelize(
            copy.deepcopy(layer), mesh, dim=case.shards if len(case.shards) > 1 else case.shards[0]
        )
        sharded = dict(call.named_parameters())
    else:
        kind = getattr(haloconv.nn, type(layer).__name__)
        options = dict(
            kernel_size=case.kernel,
            stride=case.stride,
            padding=case.padding,
            dilation=case.dilation,
            groups=case.groups,
            bias=case.bias,
            dtype=torch.float64,
        )
        if case.transposed:
            options["output_padding"] = case.output_padding
        call = kind(*case.channels, **options)
        call.load_state_dict(layer.state_dict())
        assert_close(call(x), layer(x), "the layer on a plain tensor")
        call = distribute_module(call, mesh)
        sharded = dict(call.named_parameters())
    params = {name: (p, sharded[name]) for name, p in layer.named_parameters()}
    with context:
        got, xs = check_same(mesh, placements, layer, x, call, grad=grad, params=params)
    if case.route == "parallelize":
        for name, parameter in sharded.items():
            assert_replicated(
                parameter.grad, dict(layer.named_parameters())[name].grad, f"reduced gradient of {name}"
            )
    form = {2: torch.channels_last, 3: torch.channels_last_3d}.get(len(case.sizes))
    local = xs.to_local()
    # where the format can be told at all: not with one channel or one pixel, nor without elements
    if case.channels_last and form and local.is_contiguous(memory_format=form) and not local.is_contiguous():
        for what, tensor in [("output", got.to_local()), ("input gradient", xs.grad.to_local())]:
            if tensor.numel():
                assert tensor.is_contiguous(memory_format=form), (
                    f"{what}: local part {tensor.stride()} isn't {form}"
                )
    return True


def world_of(case):
    if isinstance(case.mesh, tuple):
        count = 1
        for extent in case.mesh:
            count *= extent
        return count
    return 1 + max(torch.tensor(case.mesh).flatten().tolist())


def run(case, world=None, timeout=60):
    from harness import run_ranks

    done = run_ranks(world or world_of(case), check, case, timeout=timeout)
    assert True in done and all(value in (True, None) for value in done)


def group_extent(case, position):
    """How many ranks the mesh dim at `position` has."""
    shape = case.mesh if isinstance(case.mesh, tuple) else torch.tensor(case.mesh).shape
    if case.submesh:
        return shape[0 if case.submesh == "a" else 1]
    return shape[position]


def marks(case):
    """The census marks (reference.py) of a case: the union over its sharded spatial dims."""
    import reference

    found = set()
    for position, dim in enumerate(case.shards):
        if dim is not None and dim >= 2:
            found |= reference.census(window(case, dim - 2), group_extent(case, position))
        elif (
            dim == 0
            and case.batch
            and any(b == e for b, e in reference.shards(case.batch, group_extent(case, position)))
        ):
            found.add("empty shard")
    return found


def window(case, axis):
    import reference

    return reference.Window(
        case.sizes[axis],
        case.kernel[axis],
        case.stride[axis],
        (case.padding[axis],) * 2,
        case.dilation[axis],
        case.transposed,
        case.output_padding[axis] if case.transposed else 0,
    )


class Block(nn.Module):
    """The start of a ConvNeXt: a stem, then x + pointwise(depthwise 7x7(x))."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.dw = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.pw = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.stem(x)
        return x + self.pw(F.gelu(self.dw(x)))


def double(module):
    torch.manual_seed(0)
    return module().double()


def pairs(plain, sharded):
    others = dict(sharded.named_parameters())
    return {name: (p, others[name]) for name, p in plain.named_parameters()}
