"""What a training step does, counted: work of each class of ops, exchanges, gradients, what stays alive.

`count` runs a step of a network on tensors without memory and gives a `Work`. Work is a constant (weights, optimizer,
calls) and a part in proportion to the image's pixels; `at_width` fits the two from counts at two widths, so that any
width of any network costs two small counts. `Counter` counts, and with a clock times, real tensors too: that is what
rates are calibrated with.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

import haloconv
import torch
import torch.distributed as dist
from memory_cases import program
from memory_measure import _flops
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
FORWARD = (aten.convolution.default, torch.ops.haloconv.convolution.default)
BACKWARD = (aten.convolution_backward.default, torch.ops.haloconv.convolution_backward.default)
POOLS = (aten.max_pool2d_with_indices.default,)
WRAPPED = "on DTensors"  # the class of ops that DTensor makes other ops of
BUCKET_BYTES = 25 * 2**20
DENSE = ("dense", "pointwise", "grouped", "product")


@dataclass(frozen=True)
class Window:
    """A sliding window over the width, as it was called."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    width: int
    column_bytes: int
    backward: bool

    def messages(self, ranks):
        """Messages and bytes that an inner rank sends, and columns that it computes twice, of those that it has."""
        if ranks == 1 or self.kernel == 1:
            return 0, 0, 0.0
        plan = haloconv.plan(self.width, ranks, self.kernel, self.stride, self.padding, self.dilation)
        of_rank = plan.ranks[min(1, ranks - 1)]
        columns = sum(end - begin for _, begin, end in of_rank.sends)
        own = of_rank.owned_in[1] - of_rank.owned_in[0]
        return len(of_rank.sends), columns * self.column_bytes, columns / max(1, own)


@dataclass
class Work:
    """Of a step on one rank."""

    calls: dict = field(default_factory=lambda: defaultdict(float))  # class of ops -> calls
    flops_of: dict = field(default_factory=lambda: defaultdict(float))  # -> flops
    bytes_of: dict = field(default_factory=lambda: defaultdict(float))  # -> bytes, read and written
    windows: list = field(default_factory=list)
    norms: int = 0  # with statistics over space
    parameter_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: float = 0.0

    def flops(self):
        return sum(self.flops_of.values())

    def bytes(self):
        """Of what is neither a convolution nor a product."""
        return sum(v for name, v in self.bytes_of.items() if not name.startswith((*DENSE, "depthwise")))

    def exchanges(self, ranks):
        """Of an inner rank in a step: exchanges, messages, bytes, boundary share by whether it is backward."""
        if ranks == 1:
            return 0, 0, 0.0
        each = [window.messages(ranks) for window in self.windows]
        exchanges = sum(1 for messages, _, _ in each if messages) + 2 * self.norms
        messages = sum(m for m, _, _ in each) + 2 * self.norms * (ranks - 1)
        return exchanges, messages, float(sum(sent for _, sent, _ in each))

    def boundary(self, ranks):
        """Columns that are computed twice, of a rank's own: the mean over convolutions."""
        shares = [window.messages(ranks)[2] for window in self.windows if window.kernel > 1]
        return sum(shares) / len(shares) if shares and ranks > 1 else 0.0

    def buckets(self):
        return max(1, math.ceil(self.parameter_bytes / BUCKET_BYTES))


def conv_class(func, args):
    weight = args[1] if func in FORWARD else args[2]
    groups = args[8] if func in (FORWARD[0], FORWARD[1]) else None
    if func is BACKWARD[0]:
        groups = args[9]
    elif func is BACKWARD[1]:
        groups = args[8]
    window = math.prod(weight.shape[2:])
    kind = "pointwise" if window == 1 else "dense"
    if groups > 1:
        kind = "depthwise" if weight.shape[1] == 1 else "grouped"
    return f"{kind} {func.namespace} {'forward' if func in FORWARD else 'backward'}"


def is_view(func):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def classified(func, args, kwargs, out):
    """Class of an op, its flops, and the bytes that it reads and writes. Of other ops than convolutions and products
    flops are not counted: memory bounds them."""
    if is_view(func):
        return "view", 0.0, 0.0
    moved = float(sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)))
    flops = float(_flops(func, args, kwargs, out))
    if func in FORWARD or func in BACKWARD:
        return conv_class(func, args), flops, moved
    return ("product" if flops else func.overloadpacket._qualified_op_name), flops, moved


def window_of(func, args):
    """The window over the width of a convolution or a pool, or None."""
    if func in POOLS:
        x, kernel, stride, padding, dilation = (*args[:5], *([], 0, 1)[len(args[:5]) - 2 :])
        return Window(
            _last(kernel),
            _last(stride or kernel),
            _last(padding),
            _last(dilation),
            x.shape[-1],
            _column(x),
            False,
        )
    if func not in FORWARD and func not in BACKWARD:
        return None
    backward = func in BACKWARD
    x, weight = args[1:3] if backward else args[:2]
    at = 3 + (func is BACKWARD[0])
    stride, padding, dilation = args[at : at + 3]
    moved = args[0] if backward else x
    return Window(
        weight.shape[-1], stride[-1], padding[-1], dilation[-1], x.shape[-1], _column(moved), backward
    )


def _last(value):
    return value if isinstance(value, int) else value[-1]


def _column(tensor):
    return tensor.nbytes // max(1, tensor.shape[-1])


class Counter(TorchDispatchMode):
    """Counts into `work`; with a clock (a function that gives seconds) notes every op in `points`, as (class, flops,
    bytes, seconds)."""

    def __init__(self, clock=None):
        super().__init__()
        self.work, self.clock, self.points = Work(), clock, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):  # the ops that it makes of it come here, too
            self.work.calls[WRAPPED] += 1
            return NotImplemented
        kwargs = kwargs or {}
        begin = self.clock() if self.clock else 0.0
        out = func(*args, **kwargs)
        seconds = self.clock() - begin if self.clock else 0.0
        if func.namespace in ("prim", "profiler"):  # fake tensors and profilers call them, nobody else
            return out
        name, flops, moved = classified(func, args, kwargs, out)
        self.work.calls[name] += 1
        self.work.flops_of[name] += flops
        self.work.bytes_of[name] += moved
        if self.clock:
            self.points.append((name, flops, moved, seconds))
        window = None if func in (FORWARD[1], BACKWARD[1]) else window_of(func, args)
        if window is not None and window.width > 1:
            self.work.windows.append(window)
        return out


def _counted(case):
    """A step of the case on one rank, on tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seen = {}

    def keep(tensor):
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        seen[storage._cdata] = storage.nbytes()
        return tensor

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            run = program(case, mesh, 0)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                run.step()
            counter = Counter()
            with counter:
                run.step()
            work = counter.work
            parameters = list(run.model.parameters())
            for tensor in (*parameters, *run.model.buffers()):
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                seen.pop(storage._cdata, None)
            work.parameter_bytes = sum(parameter.nbytes for parameter in parameters)
            states = run.optimizer.state.values() if run.optimizer is not None else ()
            work.state_bytes = sum(
                t.nbytes for s in states for t in s.values() if isinstance(t, torch.Tensor)
            )
            work.activation_bytes = float(sum(seen.values()))
            work.norms = sum(
                isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in run.model.modules()
            )
    finally:
        dist.destroy_process_group()
    return work


_cache = {}


def count(case, narrow=128):
    """The Work of one rank that has an image of the case's input, split with nobody (`way`: "one card", the plain
    network, or "haloconv", on a mesh of one rank), from counts at the widths `narrow` and 2 · `narrow`. For before
    there is a process group."""
    batch, channels, height, width = case.input
    key = (case.model, case.way, case.optimizer, case.checkpointing, batch, height, narrow)
    if key not in _cache:
        one = replace(case, ranks=1)
        _cache[key] = [
            _counted(replace(one, input=(batch, channels, height, w))) for w in (narrow, 2 * narrow)
        ]
    work = at_width(*_cache[key], width / narrow)
    if case.way == "haloconv":  # its windows are those of the plain network
        work.windows = count(replace(case, way="one card"), narrow).windows
    return work


def at_width(first, second, times):
    """Work at `times` the width of `first`; `second` is at twice."""

    def line(a, b):
        return a + (b - a) * (times - 1)

    work = replace(second)
    work.calls = dict(second.calls)
    for kind in ("flops_of", "bytes_of"):
        once, twice = getattr(first, kind), getattr(second, kind)
        setattr(work, kind, {n: line(once.get(n, 0.0), twice.get(n, 0.0)) for n in {**once, **twice}})
    work.activation_bytes = line(first.activation_bytes, second.activation_bytes)
    work.windows = [replace(window, width=round(window.width * times / 2)) for window in second.windows]
    return work
