"""`parallelize`: makes a module a sharded one, in place, and `unparallelize`, which undoes it."""

import hashlib

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from . import _dtensor, _fsdp, _nccl, _rules, nn
from ._check import as_bool, as_int, on_rank
from ._distribute import distribute, gather
from ._dtensor import DTensor, Replicate
from ._gradients import GradientReducer
from ._mesh import check_mesh
from ._rules import MARK  # on the parallelized module: its _Parallel

_WAS = "_haloconv_was"  # on a swapped layer: the class it had

_SWAPS = {getattr(torch.nn, name): getattr(nn, name) for name in nn.__all__}


class _Parallel:
    """What parallelize leaves on a module, and its forward hooks."""

    def __init__(self, mesh, dim, shard_inputs, gather_outputs, on_missing):
        self.mesh, self.dim = mesh, dim
        self.shard_inputs, self.gather_outputs = shard_inputs, gather_outputs
        self.on_missing = on_missing
        self.agreed = 0  # forwards that are running with random generators that the ranks agree on
        self.reducer = GradientReducer()
        _rules.add_policy(self)

    def __deepcopy__(self, memo):
        """A copied module has its own reducer, on the same mesh."""
        copy = _Parallel(self.mesh, self.dim, self.shard_inputs, self.gather_outputs, self.on_missing)
        memo[id(self)] = copy
        return copy

    def install(self, module):
        self.reducer.attach(module)
        module.register_forward_pre_hook(_before_forward, with_kwargs=True, prepend=True)
        module.register_forward_hook(_after_forward)
        module.register_forward_hook(_after_any_forward, always_call=True)

    def remove(self, module):
        self.reducer.detach()
        for hooks, *marks in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (
                module._forward_hooks,
                module._forward_hooks_with_kwargs,
                module._forward_hooks_always_called,
            ),
        ):
            # By function: a deep copy has the hooks, but no handles for them.
            for key in [key for key, hook in hooks.items() if hook in _HOOKS]:
                for table in (hooks, *marks):
                    table.pop(key, None)


# The hooks are functions, so that a deep copy of a module shares them; what they need hangs on the module.


def _before_forward(module, args, kwargs):
    state = module.__dict__[MARK]
    if not torch.compiler.is_compiling():
        state.reducer.attach(module)
        if module.training:
            _rules.agree(state.mesh)
            state.agreed += 1
    if state.shard_inputs:
        args, kwargs = _shard_images((args, kwargs), state)
    return args, kwargs


def _after_forward(module, args, output):
    if module.__dict__[MARK].gather_outputs:
        return tree_map_only(DTensor, gather, output)
    return output


def _after_any_forward(module, args, output):
    """Also after one that failed."""
    state = module.__dict__[MARK]
    if state.agreed > 0:
        state.agreed -= 1
        _rules.disagree()


_HOOKS = (_before_forward, _after_forward, _after_any_forward)


def _shard_images(inputs, state):
    """Shards the first plain floating tensor of three or more dims, and those that match it where it is sharded."""
    dims = state.dim if isinstance(state.dim, tuple) else (state.dim,)
    found = []

    def shard(tensor):
        if isinstance(tensor, DTensor):
            return tensor
        if not found:
            if tensor.dim() < 3 or not tensor.is_floating_point():
                return tensor
            found.append(tensor)
        image = found[0]
        if tensor is not image and (
            tensor.dim() != image.dim() or any(tensor.shape[dim] != image.shape[dim] for dim in dims)
        ):
            return tensor
        return distribute(tensor, state.mesh, state.dim)

    return tree_map_only(torch.Tensor, shard, inputs)


def _named_tensors(module):
    """(owner's table, name in it, full name) of each parameter and buffer, shared ones as often as they appear."""
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield table, name, f"{prefix}.{name}".lstrip(".")


def _check_module(module, mesh):
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is a {type(module).__name__}, expected a torch.nn.Module{on_rank()}")
    for name, child in module.named_modules():
        if MARK in child.__dict__:
            raise ValueError(f"module '{name}' is parallelized already, expected one that is not{on_rank()}")
        if isinstance(child, torch.jit.ScriptModule):
            raise TypeError(f"module '{name}' is a TorchScript one, expected Python's{on_rank()}")
        if isinstance(child, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            raise ValueError(
                f"module '{name}' is a {type(child).__name__}, which would not see the new parameters; expected a "
                f"mesh with the batch on one of its dims, dim=(0, -1), or FSDP2 afterwards{on_rank()}"
            )
    for table, name, full_name in _named_tensors(module):
        tensor = table[name]
        if isinstance(tensor, DTensor):
            raise ValueError(f"'{full_name}' is a DTensor already, expected a plain tensor{on_rank()}")
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"'{full_name}' is not initialised yet, expected a first forward before{on_rank()}"
            )
        if tensor.is_meta:
            raise ValueError(f"'{full_name}' is on the meta device, expected initialised values{on_rank()}")


def _check_dim(dim, mesh):
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    dims = tuple(as_int("dim", value) for value in dims)
    if len(dims) != mesh.ndim or len(set(dims)) != len(dims):
        raise ValueError(
            f"dim is {dim!r}, expected {mesh.ndim} different dim(s), one for each dim of the mesh "
            f"{tuple(mesh.shape)}{on_rank()}"
        )
    return dims if isinstance(dim, (tuple, list)) else dims[0]


def _broadcast(tensor, mesh):
    """From the mesh's first rank to all, one mesh dim after the other."""
    for mesh_dim in range(mesh.ndim):
        if mesh.size(mesh_dim) > 1:
            dist.broadcast(tensor, group=mesh.get_group(mesh_dim), group_src=0)


def _check_agreement(module, mesh):
    """Raises on every rank when a tensor is not the same on all of them."""
    digests = {
        full_name: (str(table[name].dtype), tuple(table[name].shape), _digest(table[name]))
        for table, name, full_name in _named_tensors(module)
    }
    seen = [digests]
    for mesh_dim in range(mesh.ndim):
        gathered = [None] * mesh.size(mesh_dim)
        dist.all_gather_object(gathered, seen, group=mesh.get_group(mesh_dim))
        seen = [digests for part in gathered for digests in part]
    for position, other in enumerate(seen):
        if other != seen[0]:
            names = [name for name in {**seen[0], **other} if seen[0].get(name) != other.get(name)]
            raise ValueError(
                f"broadcast is False and '{names[0]}' ({len(names)} tensor(s) in all) differs between position 0 and "
                f"{position} of the mesh, expected the same on all ranks{on_rank()}"
            )


def _digest(tensor):
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _agreed_values(tensor, mesh, broadcast):
    """A parameter or buffer, detached, on the mesh's device, with the values of the mesh's first rank."""
    local = tensor.detach()
    if local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    if broadcast:
        dense = local.contiguous()
        _broadcast(dense, mesh)
        if dense is not local and dense.data_ptr() != local.data_ptr():
            local = torch.empty_like(local).copy_(dense)  # the values, in the memory format that it had
    return local


def _as_replicated(tensor, mesh, broadcast):
    """A Replicate DTensor of a parameter or buffer: a Parameter for a Parameter."""
    with torch.no_grad():
        local = _agreed_values(tensor, mesh, broadcast)
        placed = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if not isinstance(tensor, torch.nn.Parameter):
        return placed
    parameter = torch.nn.Parameter(placed, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # marks that models and optimizers leave on parameters
    if tensor.grad is not None:
        grad = tensor.grad.to(placed.device)
        parameter.grad = DTensor.from_local(grad, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return parameter


def _as_dense(parameter, mesh, broadcast):
    """A plain, contiguous parameter, which is what FSDP2 takes."""
    with torch.no_grad():
        local = _agreed_values(parameter, mesh, broadcast).contiguous()
    return torch.nn.Parameter(local, requires_grad=parameter.requires_grad)


def parallelize(
    module,
    mesh,
    dim=-1,
    *,
    shard_inputs=False,
    gather_outputs=False,
    broadcast=True,
    on_missing="error",
    shard_states=False,
    states_options=None,
):
    """Makes a module work on sharded DTensors, in place.

    Its parameters and buffers become ``Replicate`` DTensors on `mesh`, its convolutions the `haloconv.nn` layers of the
    same name, and the rules are switched on (`enable_rules`). During backward the gradients are summed over the mesh,
    so that after ``loss.backward()`` every ``param.grad`` is ``Replicate``. Plain tensors that the forward makes itself
    count as replicated. Make the optimizer afterwards: the parameters are new objects.

    Args:
        module: any torch.nn.Module, a whole model or a part of one.
        mesh: a DeviceMesh. For data parallelism beside it either a mesh of two dims and ``dim=(0, -1)``, or FSDP2 on
            another mesh dim afterwards, and here the spatial submesh, ``mesh["w"]``.
        dim: which dim of an image `shard_inputs` shards; a tuple with one dim for each mesh dim.
        shard_inputs: plain image tensors given to the module are sharded: the first floating-point tensor of three or
            more dims, and every other one that has as many dims and the same size where it is sharded.
        gather_outputs: the module returns plain, full tensors.
        on_missing: what happens to an op that has no sharded form, such as attention over space, while the module's
            forward or backward runs. "error": RuntimeError. "gather": its inputs are gathered on every rank for that op
            alone, and its result is sharded again; a warning says so, once for each op.
        broadcast: the values of the mesh's first rank go to all. False: they are checked to agree.
        shard_states: each rank keeps only its part of every parameter, gradient and optimizer state: FSDP2
            (`torch.distributed.fsdp.fully_shard`) on the same ranks. True: the module is one group, whose parameters
            are gathered when it runs. A list of submodules: each is a group of its own, gathered when it runs and
            freed after, and the rest is another; the blocks of a network are a good choice. Such a module cannot be
            copied or undone: save `full_state_dict`.
        states_options: what goes to `fully_shard`: "mp_policy", "reshard_after_forward", and "mesh", where more ranks
            than the images' hold parts, such as ``mesh`` of two dims for images on ``mesh["w"]``: gradients are then
            averaged over the others. Of a mesh of two dims FSDP2 shards over the last and replicates over the first.

    Returns:
        `module`.

    Raises:
        TypeError, ValueError: an argument does not fit, or (on every rank) `broadcast` is False and the ranks' values
            differ.
    """
    check_mesh(mesh)
    dim = _check_dim(dim, mesh)
    for name, value in (
        ("shard_inputs", shard_inputs),
        ("gather_outputs", gather_outputs),
        ("broadcast", broadcast),
    ):
        as_bool(name, value)
    if on_missing not in ("error", "gather"):
        raise ValueError(f"on_missing is {on_missing!r}, expected 'error' or 'gather'{on_rank()}")
    _check_module(module, mesh)
    shards_states = shard_states is not False
    if shards_states:
        groups, states_options = _fsdp.check(module, mesh, shard_states, states_options)
    elif states_options is not None:
        raise ValueError(
            f"states_options is {states_options!r} and shard_states False, expected None{on_rank()}"
        )
    _rules.enable_rules()
    _nccl.connect_mesh(mesh)
    _rules.tag_caches()
    _dtensor.allow_implicit_replication()
    if not broadcast:
        _check_agreement(module, mesh)
    placed = {}  # tied parameters stay tied
    for table, name, _ in list(_named_tensors(module)):
        tensor = table[name]
        if id(tensor) not in placed:
            dense = shards_states and isinstance(tensor, torch.nn.Parameter)
            place = _as_dense if dense else _as_replicated
            placed[id(tensor)] = tensor, place(tensor, mesh, broadcast)
        table[name] = placed[id(tensor)][1]
    for child in module.modules():
        if type(child) in _SWAPS:
            child.__dict__[_WAS] = type(child)
            child.__class__ = _SWAPS[type(child)]
    state = _Parallel(mesh, dim, shard_inputs, gather_outputs, on_missing)
    module.__dict__[MARK] = state
    state.install(module)
    if shards_states:
        _fsdp.shard(module, mesh, groups, states_options)
    return module


def unparallelize(module):
    """Undoes `parallelize`, in place: torch's classes, no hooks, plain parameters and buffers with the present values.

    The rules stay on; `disable_rules` switches them off.

    Returns:
        `module`.

    Raises:
        ValueError: the module is not a parallelized one, or its states are sharded.
    """
    if isinstance(module, FSDPModule):
        raise ValueError(
            "module has sharded states, expected replicated ones: FSDP2 cannot be undone, load its full_state_dict "
            f"into a new module instead{on_rank()}"
        )
    if not isinstance(module, torch.nn.Module) or MARK not in module.__dict__:
        raise ValueError(f"module is {type(module).__name__}, expected one that was parallelized{on_rank()}")
    module.__dict__.pop(MARK).remove(module)
    placed = {}
    for table, name, _ in list(_named_tensors(module)):
        tensor = table[name]
        if isinstance(tensor, DTensor) and id(tensor) not in placed:
            placed[id(tensor)] = tensor, _as_plain(tensor)
        table[name] = placed.get(id(tensor), (None, tensor))[1]
    for child in module.modules():
        if _WAS in child.__dict__:
            child.__class__ = child.__dict__.pop(_WAS)
    return module


def _as_plain(tensor):
    plain = tensor.detach().full_tensor()
    if not isinstance(tensor, torch.nn.Parameter):
        return plain
    parameter = torch.nn.Parameter(plain, requires_grad=tensor.requires_grad)
    if isinstance(tensor.grad, DTensor):
        parameter.grad = tensor.grad.full_tensor()
    return parameter
