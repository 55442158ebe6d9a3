"""Copies that stand for views, and the writes that would be lost in them.

In torch a slice shares its memory with the tensor that it was cut from. Along a sharded dim that is impossible: its
parts come from other ranks, and it is a copy. As long as nobody writes, there is no difference. A write into either of
the two, while both exist, raises: see `check_write`. It would change one of them where torch changes both.

The two are told by the storages of their local tensors, so views of the copy count too. The first such copy of a
process puts the check in front of all ops that write; until then it costs nothing.
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _dtensor
from .._check import on_rank
from .._dtensor import DTensor, Partial, local_of
from . import _registry

_copies = {}  # storage of the copy -> (reference to it, reference to that of the original)
_originals = {}  # storage of the original -> [reference to the copy's]
_state = {"checking": False, "purge_at": 64}


def stands_for_view(copy, original, in_backward=False):
    """`copy`, a fresh DTensor that torch would have made a view of `original`.

    in_backward: whether it counts there too. Autograd's formulas only read slices, and a gradient that is one has no
    other owner.
    """
    if torch._C._current_graph_task_id() != -1 and not in_backward:
        return copy
    ours, theirs = (StorageWeakRef(local_of(x).untyped_storage()) for x in (copy, original))
    if ours.cdata == theirs.cdata:
        return copy
    if len(_copies) >= _state["purge_at"]:
        _purge()
    _copies[ours.cdata] = ours, theirs
    _originals.setdefault(theirs.cdata, []).append(ours)
    if not _state["checking"]:
        _state["checking"] = True
        _check_all_writes()
    return copy


def _purge():
    """Forgets what does not exist any more."""
    for key, (ours, theirs) in list(_copies.items()):
        if ours.expired() or theirs.expired():
            del _copies[key]
    for key, copies in list(_originals.items()):
        alive = [ref for ref in copies if ref.cdata in _copies]
        if alive:
            _originals[key] = alive
        else:
            del _originals[key]
    _state["purge_at"] = max(64, 2 * len(_copies))


def _both_alive(key):
    """Whether the storage is a copy's or an original's, and the other exists too."""
    if key in _copies:
        ours, theirs = _copies[key]
        if not ours.expired() and not theirs.expired():
            return "a copy that stands for a view of another tensor, along a sharded dim"
    if key in _originals:
        for ref in _originals[key]:
            if not ref.expired() and ref.cdata in _copies and not _copies[ref.cdata][1].expired():
                return "a tensor of which a slice along a sharded dim, a copy, still exists"
    return None


def check_write(op, args, kwargs):
    """Raises where an op writes into a tensor of which torch would have changed a view, or the original, too."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = args[position] if position < len(args) else kwargs.get(argument.name)
        if not isinstance(target, DTensor):
            continue
        what = _both_alive(local_of(target).untyped_storage()._cdata)
        if what is not None:
            raise RuntimeError(
                f"{op} writes into '{argument.name}' of shape {tuple(target.shape)} with placements "
                f"{target.placements}, which is {what}: in torch the write would show in both, here it cannot. Write "
                "into a clone() of the slice, or build the result without writing: torch.cat, torch.where, "
                f"torch.nn.functional.pad, torch.slice_scatter or torch.select_scatter{on_rank()}"
            )


# ---- the check in front of every op that writes ----


def _writing_ops():
    """In-place ops and those with an out argument. Those on lists of tensors are the optimizers', on parameters."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or name.startswith(("aten::_foreach", "aten::_fused", "aten::_amp")):
            continue
        packet, _, overload = name[len("aten::") :].partition(".")
        try:
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue  # of TorchScript alone
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
        if writes and torch.Tag.inplace_view not in op.tags:
            yield op


def _checked(function):
    def run(op, args, kwargs):
        check_write(op, args, kwargs)
        return function(op, args, kwargs)

    return run


def _alike(args, kwargs):
    """Whether all tensors are DTensors of one shape that lie alike, so that a pointwise op is a local one."""
    first = args[0]
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor) and not (
            isinstance(x, DTensor) and x.shape == first.shape and x._spec.placements == first._spec.placements
        ):
            return False
    return isinstance(first, DTensor) and not any(isinstance(p, Partial) for p in first._spec.placements)


def _write(op, args, kwargs):
    check_write(op, args, kwargs)
    is_in_place = op._schema.name.endswith("_") and torch.Tag.pointwise in op.tags
    if is_in_place and torch.Tag.nondeterministic_seeded not in op.tags and _alike(args, kwargs):
        op(*(local_of(x) if isinstance(x, DTensor) else x for x in args), **kwargs)
        return args[0]
    return _registry.torchs_own(op, args, kwargs)


def _check_all_writes():
    installed = _dtensor.handlers()
    without_rule = {}
    for op in _writing_ops():
        for table in (_registry._forward, _registry._backward):
            if op in table:
                function = table[op]
                table[op] = _checked(function)
                if installed.get(op) is function:
                    installed[op] = table[op]
                break
        else:
            without_rule[op] = _registry._reporting(_write)
    _registry._backward.update(without_rule)
    _registry._install(without_rule)
