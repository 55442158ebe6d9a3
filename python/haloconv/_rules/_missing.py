"""What happens to an op that has no sharded form: an error, or, where asked for, a gather of that op alone.

torch's DTensor decides how each op's inputs have to lie, and redistributes an activation without a word where an op
cannot work on shards. While the rules are on, its decision is looked at first: one that moves an activation's shards,
or the lack of one, ends in `_without_sharded_form`. Its policy is `parallelize`'s `on_missing`.

What counts as an activation: three or more dims, sharded in dim 2 or later (in any dim, on a mesh that `parallelize`
has seen). Weights that a program shards itself are none of haloconv's business.
"""

import sys
import warnings
import weakref

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import _dtensor
from .._check import on_rank
from .._dtensor import DTensor, Partial, Replicate, Shard, is_exactly_shard, local_of
from .._layout import is_sharded, wrap_as
from .._ops import shard_bounds
from .._transport import statistics
from ._views import stands_for_view

MARK = "_haloconv"  # on a parallelized module: what parallelize left there, with its mesh and on_missing

aten = torch.ops.aten
_ELEMENTWISE = {
    getattr(getattr(aten, name), overload)  # not tagged as such
    for name, overload in (
        ("clone", "default"),
        ("_to_copy", "default"),
        ("copy_", "default"),
        ("zeros_like", "default"),
        ("ones_like", "default"),
        ("empty_like", "default"),
        ("full_like", "default"),
        ("fill_", "Scalar"),
        ("zero_", "default"),
    )
}

_elementwise = None  # the rule for elementwise ops, once it is there: see set_elementwise
_last_resorts = {}  # op -> a rule for what torch has no sharded form for: see last_resort
_parallelized = weakref.WeakSet()  # of the same
_warned = set()


def watch():
    """From now on torch's decisions are looked at."""
    _dtensor.intercept_propagation(_decide)


def unwatch():
    """torch decides alone again."""
    _dtensor.release_propagation()


def add_policy(state):
    """`state` has a mesh and on_missing, which counts in backward as long as it lives."""
    _parallelized.add(state)


def set_elementwise(rule):
    """The rule that takes any elementwise op."""
    global _elementwise
    _elementwise = rule


def last_resort(*ops):
    """Registers a rule that is asked where torch has no sharded form. It may have none either, and return None."""

    def register(function):
        _last_resorts.update(dict.fromkeys(ops, function))
        return function

    return register


def _decide(propagate, op, args, kwargs):
    """In place of torch's propagation: its result, or that of the whole op."""
    try:
        decision = propagate()
    except Exception as error:
        unknown = "sharding strategy" in str(error)
        if unknown and not any(map(is_sharded, tree_leaves((args, kwargs)))):
            return _on_whole_tensors(op, args, kwargs)  # every rank has all of it
        if not any(_is_activation(x) for x in tree_leaves((args, kwargs))):
            result = _last_resorts[op](op, args, kwargs) if op in _last_resorts else None
            if result is not None:  # a view of a flattened activation, as one
                return result
            raise
        return _without_sharded_form(op, args, kwargs, error)
    moves = any(
        _moves(before, after) for before, after in _dtensor.redistributed_specs(decision, args, kwargs)
    )
    # A flattened dim of which an inner part was sharded: torch writes that down, but few of its ops read it right.
    if moves or (_dtensor.orders_shards_anew(decision) and any(map(_is_activation, tree_leaves(args)))):
        return _without_sharded_form(op, args, kwargs, None)
    return decision


def _is_activation(x):
    return is_sharded(x) and any(_is_watched(x, placement) for placement in x.placements)


def _is_watched(x, placement):
    """Whether a placement shards an activation. `x` is a DTensor or a spec."""
    if x.ndim < 3 or isinstance(placement, (Replicate, Partial)):
        return False
    mesh = x.device_mesh
    return placement.dim % x.ndim >= 2 or any(state.mesh == mesh for state in _parallelized)


def _moves(before, after):
    """Whether shards of an activation would leave their ranks."""
    return any(
        was != becomes and before.device_mesh.size(mesh_dim) > 1 and _is_watched(before, was)
        for mesh_dim, (was, becomes) in enumerate(zip(before.placements, after.placements))
    )


# ---- policy ----


def _modules_on_the_stack():
    """The modules whose code is running, outermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and (not found or found[-1] is not owner):
            found.append(owner)
        frame = frame.f_back
    return found[::-1]


def _policy(mesh, modules):
    for module in reversed(modules):
        if MARK in module.__dict__:
            return module.__dict__[MARK].on_missing
    # In backward, where no module's code runs, and while compiling.
    gathers = any(state.on_missing == "gather" for state in _parallelized if state.mesh == mesh)
    return "gather" if gathers else "error"


def _where(modules):
    """The path of the innermost module, for a message."""
    if not modules:
        return " in backward" if torch._C._current_graph_task_id() != -1 else ""
    root = next((module for module in modules if MARK in module.__dict__), modules[0])
    inner = modules[-1]
    path = next((name for name, module in root.named_modules() if module is inner), "")
    return f" in module '{path}' ({type(inner).__name__})" if path else f" in {type(inner).__name__}"


def _without_sharded_form(op, args, kwargs, cause):
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return op.decompose(*args, **kwargs)  # undecomposed under inference_mode: its parts may have one
    if _elementwise is not None and (torch.Tag.pointwise in op.tags or op in _ELEMENTWISE):
        return _elementwise(op, args, kwargs)  # torch wants no dim split over more ranks than it has elements
    if op in _last_resorts:
        result = _last_resorts[op](op, args, kwargs)
        if result is not None:
            return result
    x = next(x for x in tree_leaves((args, kwargs)) if is_sharded(x))
    modules = _modules_on_the_stack()
    if _policy(x.device_mesh, modules) == "gather" and torch.Tag.nondeterministic_seeded not in op.tags:
        return _gathered(op, args, kwargs, modules)
    raise RuntimeError(
        f"{op}{_where(modules)} has no sharded form for an input of shape {tuple(x.shape)} with placements "
        f"{x.placements}, expected one that it can work on. Two ways out: parallelize(..., on_missing='gather') "
        "gathers the input for such ops alone; or redistribute it where the model may, e.g. with haloconv.gather"
        f"{on_rank()}" + (f". torch says: {str(cause).splitlines()[0]}" if cause else "")
    ) from cause


# ---- gather ----


def _gathered(op, args, kwargs, modules):
    """The op on gathered inputs, its results sharded again. Says so once."""
    nbytes = sum(x.numel() * x.element_size() for x in tree_leaves((args, kwargs)) if is_sharded(x))
    statistics.add("gather", bytes=nbytes)
    if op not in _warned:
        _warned.add(op)
        warnings.warn(
            f"haloconv: {op}{_where(modules)} has no sharded form: {nbytes} bytes are gathered on every rank for it "
            "(said once for each op)",
            stacklevel=2,
        )
    return _on_whole_tensors(op, args, kwargs)


def _on_whole_tensors(op, args, kwargs):
    """The op on whole tensors, its results sharded like the first input that was."""
    dtensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
    reference = next(filter(is_sharded, dtensors), dtensors[0])

    def whole(x):
        return local_of(x.redistribute(placements=[Replicate()] * x.device_mesh.ndim))

    whole_args, whole_kwargs = tree_map_only(DTensor, whole, (args, kwargs))
    result = op(*whole_args, **whole_kwargs)
    written = _write_back(op, args, whole_args, kwargs, whole_kwargs)
    if written is not None:
        return written
    results = tree_map_only(torch.Tensor, lambda tensor: _sharded_again(tensor, reference), result)
    if any(returned.alias_info is not None for returned in op._schema.returns):  # a view, in torch
        tree_map_only(DTensor, lambda x: stands_for_view(x, reference, in_backward=True), results)
    return results


def _write_back(op, args, whole_args, kwargs, whole_kwargs):
    """After an op that writes into its arguments: the new values go into the shards. What it wrote, None if nothing."""
    written = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        by_position = position < len(args)
        target = args[position] if by_position else kwargs.get(argument.name)
        source = whole_args[position] if by_position else whole_kwargs.get(argument.name)
        if isinstance(target, DTensor):
            local_of(target).copy_(_own_part(source, target.device_mesh, target.placements))
            written.append(target)
    if not written:
        return None
    return written[0] if len(written) == 1 else tuple(written)


def _own_part(whole, mesh, placements):
    """The view of a whole tensor that is this rank's shard."""
    for mesh_dim, placement in enumerate(placements):
        if placement.is_shard():
            dim = placement.dim % whole.dim()
            begin, end = shard_bounds(whole.shape[dim], mesh.size(mesh_dim), mesh.get_coordinate()[mesh_dim])
            whole = whole.narrow(dim, begin, end - begin)
    return whole


def _sharded_again(whole, reference):
    """Sharded like `reference` as far as the dims are the same ones, else replicated."""
    mesh, placements = reference.device_mesh, []
    for placement in reference.placements:
        dim = placement.dim % reference.dim() if is_exactly_shard(placement) else None
        same = dim is not None and whole.dim() == reference.dim() and whole.shape[dim] > 1
        placements.append(Shard(dim) if same else Replicate())
    part = _own_part(whole, mesh, placements)
    local = part if part.shape == whole.shape else part.clone()  # frees the whole one
    return wrap_as(local, mesh, placements, whole.shape)
