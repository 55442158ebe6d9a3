"""Parameters, gradients and optimizer states sharded over the ranks that split the images: FSDP2 on the same mesh.

FSDP2 owns plain parameters: it gathers a group's before the group runs, frees them after, and averages their gradients
while it scatters them. Two things have to be put between it and a spatially sharded forward:

* The layers want parameters that are ``Replicate`` DTensors. So an attribute access that finds a gathered parameter
  presents it as one, around the same memory (FSDP2 frees and refills it under saved tensors; that goes on). It is the
  access, and not a hook on the forward, since a checkpoint recomputes any part of a forward during backward. What FSDP2
  itself and the optimizer see (``module._parameters``) stays plain.
* A gradient that is Partial is this rank's part of a sum, of which FSDP2 will take the average. So it goes on as the
  part times the number of ranks. One that all ranks have computed alike (``Replicate``) goes on as it is.
"""

import functools

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ._check import on_rank
from ._dtensor import DTensor, Partial, Replicate, local_of, wrap_strided
from ._mesh import ranks_of

_OPTIONS = ("mesh", "mp_policy", "reshard_after_forward")


class _Present(torch.autograd.Function):
    """A plain parameter as a replicated DTensor around the same memory."""

    @staticmethod
    def forward(ctx, parameter, mesh):
        replicated = [Replicate()] * mesh.ndim
        return wrap_strided(parameter.detach(), mesh, replicated, parameter.shape, parameter.stride())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if not isinstance(grad, DTensor):
            return grad, None
        sums = [p for p in grad.placements if isinstance(p, Partial) and p.reduce_op in ("sum", "avg")]
        if len(sums) + sum(isinstance(p, Replicate) for p in grad.placements) < len(grad.placements):
            return grad.full_tensor(), None
        times = 1
        for mesh_dim, placement in enumerate(grad.placements):
            if isinstance(placement, Partial) and placement.reduce_op == "sum":
                times *= grad.device_mesh.size(mesh_dim)
        local = local_of(grad)
        return (local if times == 1 else local * times), None


class _Presents:
    """Comes before a module's class in the bases of the one that it is given."""

    def __getattr__(self, name):
        found = super().__getattr__(name)
        if isinstance(found, torch.nn.Parameter) and not isinstance(found, DTensor):
            return _Present.apply(found, self._haloconv_mesh)
        return found


@functools.cache
def _presenting(kind, mesh):
    body = {"_haloconv_mesh": mesh, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Presents, kind), body)


def check(module, mesh, shard_states, options):
    """The submodules whose parameters FSDP2 is to gather together, innermost first, and its options.

    Raises:
        TypeError, ValueError: an argument of `parallelize` does not fit.
    """
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"states_options is {options!r}, expected a dict{on_rank()}")
    options = dict(options or {})
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ValueError(f"states_options has {unknown}, expected some of {list(_OPTIONS)}{on_rank()}")
    options.setdefault("mesh", mesh)
    _check_states_mesh(options["mesh"], mesh)
    if isinstance(shard_states, bool):
        return [], options
    if not isinstance(shard_states, (list, tuple, torch.nn.ModuleList, torch.nn.Sequential)) or not all(
        isinstance(child, torch.nn.Module) for child in shard_states
    ):
        raise TypeError(
            f"shard_states is {shard_states!r}, expected a bool or a list of submodules{on_rank()}"
        )
    wanted = {id(child) for child in shard_states} - {id(module)}
    groups = [child for child in module.modules() if id(child) in wanted][::-1]
    if len(groups) != len(wanted):
        raise ValueError(
            f"shard_states has {len(wanted) - len(groups)} module(s) that are none of the module's, expected its "
            f"submodules{on_rank()}"
        )
    _check_sharing(module, groups)
    return groups, options


def _check_states_mesh(states_mesh, mesh):
    if not isinstance(states_mesh, DeviceMesh):
        raise TypeError(f"states_options['mesh'] is {states_mesh!r}, expected a DeviceMesh{on_rank()}")
    if states_mesh.ndim > 2:
        raise ValueError(
            f"states are to be sharded over a mesh of {states_mesh.ndim} dims, expected 1, or 2 (of which FSDP2 "
            f"replicates over the first): pass one as states_options['mesh']{on_rank()}"
        )
    if states_mesh.ndim == 2 and states_mesh.mesh_dim_names is None:
        raise ValueError(
            f"states are to be sharded over {states_mesh}, expected names for its two dims, which FSDP2 asks for"
            f"{on_rank()}"
        )
    missing = ranks_of(mesh) - ranks_of(states_mesh)
    if missing:
        raise ValueError(
            f"states_options['mesh'] has the ranks {sorted(ranks_of(states_mesh))}, expected all of the mesh's: "
            f"the parts of a gradient that ranks {sorted(missing)} have would not be summed{on_rank()}"
        )


def _check_sharing(module, groups):
    """FSDP2 would give each group its own copy of a parameter that two share."""
    inner = {id(group) for group in groups}
    owner = {}  # parameter id -> its group and its name

    def visit(child, group, prefix):
        group = id(child) if id(child) in inner else group
        for name, parameter in child._parameters.items():
            if parameter is not None:
                first, first_name = owner.setdefault(id(parameter), (group, prefix + name))
                if first != group:
                    raise ValueError(
                        f"'{first_name}' and '{prefix + name}' are one parameter in two groups of shard_states, "
                        f"expected it in one: leave out one of the two submodules{on_rank()}"
                    )
        for name, grandchild in child._modules.items():
            if grandchild is not None:
                visit(grandchild, group, f"{prefix}{name}.")

    visit(module, id(module), "")


def shard(module, mesh, groups, options):
    """Gives the plain parameters of a module to FSDP2."""
    for child in module.modules():
        if any(parameter is not None for parameter in child._parameters.values()):
            child.__class__ = _presenting(type(child), mesh)
    for group in groups:
        fully_shard(group, **options)
    fully_shard(module, **options)
