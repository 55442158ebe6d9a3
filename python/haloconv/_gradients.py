"""Reduces the gradients of replicated parameters during backward.

An operation on a sharded activation gives each rank its part of a parameter's gradient: a DTensor that is ``Partial``.
Left so, the optimizer would all-reduce each parameter by itself, several times over. The reducer collects the gradients
in the order in which backward finishes them, in buckets, and starts a bucket's all-reduce as soon as it is full, while
backward goes on; when backward returns, every ``param.grad`` is ``Replicate``.

How a gradient is intercepted: `AccumulateGrad` adds a new gradient to ``param.grad``. Before it runs, a hook sets the
old one aside; after it, another takes the new gradient away and puts the old one back. So between the two hooks, and
only there, ``param.grad`` is the new gradient alone, and a backward that raises half-way leaves the old one in place.
Old and new are added when the new one has been reduced. ``torch.autograd.grad`` does not accumulate, and is left alone.

A hook of the user's after accumulation (an optimizer that steps during backward) expects the whole gradient to be
there: such a parameter's gradient is reduced at once, by itself, before that hook runs.

FSDP2 reduces Partial gradients itself, on parameters of its own making, which these hooks never see.
"""

import collections
import time
import weakref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from . import _transport
from ._dtensor import DTensor, Partial, Replicate, local_of, wrap_strided

BUCKET_BYTES = 25 * 2**20

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # gloo has no average: divided afterwards
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class _Bucket:
    """Gradients of one mesh, placement, dtype and device, to be reduced in one flat buffer."""

    def __init__(self, grad, nbytes):
        """For `grad` and others of its kind, as many as `nbytes` have room for."""
        local = local_of(grad)
        self.mesh, self.placements = grad.device_mesh, tuple(grad.placements)
        self.room = max(local.numel(), nbytes // local.element_size())
        self.flat = None
        # (parameter, gradient); from `start` on (parameter, its gradient's shape and stride, those of the local part)
        self.entries = []
        self.mesh_dims = [  # still to be reduced over; a group of one needs nothing
            index
            for index, placement in enumerate(self.placements)
            if isinstance(placement, Partial) and self.mesh.size(index) > 1
        ]
        self.work = None

    def fits(self, grad):
        return local_of(grad).numel() <= self.room

    def add(self, parameter, grad):
        self.room -= local_of(grad).numel()
        self.entries.append((parameter, grad))

    def _views(self, tensors):
        """Of the buffer, one for each of these tensors."""
        pieces = self.flat.split([tensor.numel() for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors)]

    def start(self):
        """Fills the buffer, lets the gradients go, and starts the all-reduce over the first mesh dim."""
        locals_ = [local_of(grad).detach() for _, grad in self.entries]
        self.flat = locals_[0].new_empty(sum(local.numel() for local in locals_))
        torch._foreach_copy_(self._views(locals_), locals_)
        self.entries = [
            (parameter, grad.shape, grad.stride(), local.shape, local.stride())
            for (parameter, grad), local in zip(self.entries, locals_)
        ]
        self._reduce()

    def _reduce(self):
        if self.mesh_dims:
            mesh_dim = self.mesh_dims[0]
            op = _REDUCE_OPS[self.placements[mesh_dim].reduce_op]
            begin = time.perf_counter()
            self.work = dist.all_reduce(self.flat, op=op, group=self.mesh.get_group(mesh_dim), async_op=True)
            seconds = time.perf_counter() - begin
            _transport.statistics.add("gradients", all_reduces=1, bytes=self.flat.nbytes, seconds=seconds)

    def finish(self):
        """[(parameter, its reduced gradient)]."""
        while self.mesh_dims:
            begin = time.perf_counter()
            self.work.wait()
            _transport.statistics.add("gradients", seconds=time.perf_counter() - begin)
            mesh_dim = self.mesh_dims.pop(0)
            if self.placements[mesh_dim].reduce_op == "avg":
                self.flat /= self.mesh.size(mesh_dim)
            self._reduce()
        # Tensors of their own, not views: in the parameter's memory format, and a DTensor around a view cannot be
        # deep-copied.
        parts = [self.flat.new_empty_strided(*like) for _, _, _, *like in self.entries]
        torch._foreach_copy_(parts, self._views(parts))
        replicated = [Replicate()] * self.mesh.ndim
        return [
            (parameter, wrap_strided(part, self.mesh, replicated, shape, stride))
            for (parameter, shape, stride, *_), part in zip(self.entries, parts)
        ]


class _Pass:
    """One run of the autograd engine."""

    def __init__(self, nbytes):
        self.nbytes = nbytes  # of a bucket
        self.filling = {}  # (mesh, placements, dtype, device) -> _Bucket
        self.started = []

    def add(self, parameter, grad):
        spec, local = grad._spec, local_of(grad)
        key = (id(spec.mesh), spec.placements, local.dtype, local.device)  # the bucket holds the mesh
        bucket = self.filling.get(key)
        if bucket is not None and not bucket.fits(grad):
            self._start(key)
            bucket = None
        if bucket is None:
            bucket = self.filling[key] = _Bucket(grad, self.nbytes)
        bucket.add(parameter, grad)

    def _start(self, key):
        bucket = self.filling.pop(key)
        bucket.start()
        self.started.append(bucket)

    def finish(self):
        for key in list(self.filling):
            self._start(key)
        while self.started:
            for parameter, grad in self.started.pop(0).finish():
                _accumulate(parameter, grad)


def _accumulate(parameter, grad):
    if parameter.grad is None:
        parameter.grad = grad
    elif grad.requires_grad:  # create_graph
        parameter.grad = parameter.grad + grad
    else:
        with torch.no_grad():
            parameter.grad += grad


def _will_accumulate(parameter):
    """Whether the engine is on its way to the parameter's AccumulateGrad: not so in torch.autograd.grad."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # how it says that autograd.grad is running for this leaf
        return False


class GradientReducer:
    """Keeps the gradients of a module's DTensor parameters `Replicate`."""

    def __init__(self):
        self._passes = {}  # graph task -> _Pass
        self._set_aside = {}  # parameter id -> the gradient from before
        self._hooks = collections.OrderedDict()  # parameter id -> its local tensor, hook handles
        self._nbytes = 0  # of all that are watched

    def attach(self, module):
        """Watches the parameters that it does not watch yet. Cheap when there is none; called before each forward."""
        if torch._C._current_graph_task_id() == -1:
            self._passes.clear()  # what a backward that raised has left
        self._nbytes = 0
        for parameter in _own_parameters(module):
            if not parameter.requires_grad or not isinstance(parameter, DTensor):
                continue
            self._nbytes += local_of(parameter).nbytes
            if not self._watches(parameter):
                after = parameter.register_post_accumulate_grad_hook(self._after)
                # Before the user's, which may be there already where Module.to has swapped the parameter.
                parameter._post_accumulate_grad_hooks.move_to_end(after.id, last=False)
                self._hooks[id(parameter)] = (
                    weakref.ref(local_of(parameter)),
                    # No weak reference: Module.to could not swap a parameter that has one.
                    parameter.register_hook(lambda grad, parameter=parameter: self._before(parameter)),
                    after,
                )

    def detach(self):
        """Removes every hook."""
        for _, *handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks.clear()

    def _watches(self, parameter):
        # A new parameter may have an old one's id.
        local, *handles = self._hooks.get(id(parameter), (lambda: None,))
        if local() is local_of(parameter):
            return True
        for handle in handles:
            handle.remove()
        # `Module.to` swaps what is behind a parameter. Its tables of hooks stay, but the autograd engine knows them no
        # more until they are assigned.
        parameter._backward_hooks = parameter._backward_hooks
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        return False

    def _before(self, parameter):
        if parameter.grad is not None and _will_accumulate(parameter):
            self._set_aside[id(parameter)] = parameter.grad
            parameter.grad = None

    def _after(self, parameter):
        grad, parameter.grad = parameter.grad, self._set_aside.pop(id(parameter), None)
        placements = grad._spec.placements if isinstance(grad, DTensor) else ()
        if all(isinstance(placement, Replicate) for placement in placements):
            _accumulate(parameter, grad)
        elif (
            grad.requires_grad
            or any(placement.is_shard() for placement in placements)
            or len(parameter._post_accumulate_grad_hooks) > 1  # another hook, which is to see all of it
        ):
            _accumulate(parameter, grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim))
        else:
            self._pass().add(parameter, grad)

    def _pass(self):
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = _Pass(min(BUCKET_BYTES, self._nbytes))
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._passes.pop(task).finish())
        return self._passes[task]


def _own_parameters(module):
    """The parameters of a module and its children, without those that FSDP2 manages."""
    if isinstance(module, FSDPModule):
        return
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for child in module._modules.values():
        if child is not None:
            yield from _own_parameters(child)
