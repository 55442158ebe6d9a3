"""Which function answers which op, and the switch.

A *rule* is a function ``(op, args, kwargs) -> result`` on DTensors, below autograd. The families in this package
register theirs with `rule` (forward) and `backward_rule`; `enable_rules` puts them into DTensor's own table
(see _dtensor.py). A rule takes the cases that torch gathers, gets wrong or has no answer for, and hands all others to
`torchs_own`.

Backward rules stay installed once they have been switched on: a backward that runs after `disable_rules` would
otherwise fall to torch's wrong ones.
"""

import contextlib
import functools
import os
import sys

import torch
import torch.distributed as dist

from .. import _dtensor
from .._check import name_rank
from .._layout import report_failure
from .._version import __version__
from . import _memo, _missing

_forward, _backward = {}, {}  # op -> rule
_originals = {}  # what torch had, for the ops whose handler was replaced at least once
_state = {"enabled": False, "graphs": None, "tag": None, "kept_whole": False}


def _reporting(function):
    """The rule, such that its failure reaches the ranks that would wait for this one. Calls that need no more than
    their op, applied to local tensors, skip it."""

    @functools.wraps(function)
    def run(op, args, kwargs):
        try:
            known = _memo.known(op, args, kwargs)
            return function(op, args, kwargs) if known is None else known[0]
        except Exception as error:
            name_rank(error)
            report_failure(error, args)
            raise

    return run


def rule(*ops):
    """Registers a forward rule. Every op is an OpOverload."""
    return _register(_forward, ops)


def backward_rule(*ops):
    """Registers a rule that outlives `disable_rules`."""
    return _register(_backward, ops)


def _register(table, ops):
    def register(function):
        wrapped = _reporting(function)
        for op in ops:
            if op in _forward or op in _backward:
                raise ValueError(f"op is {op}, expected one without a rule")
            table[op] = wrapped
        return function

    return register


def bound(op, args, kwargs):
    """The arguments by name, defaults filled in."""
    values = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            values[argument.name] = args[position]
        elif argument.name in kwargs:
            values[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
    return values


def torchs_own(op, args, kwargs):
    """What torch does with the op when haloconv is not there."""
    original = _originals[op]
    if original is not None:
        return original(op, args, kwargs)
    table = _dtensor.handlers()  # sharding propagation, which is what happens without a handler
    ours = table.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        table[op] = ours


# ---- the switch ----


def _install(rules):
    table = _dtensor.handlers()
    for op, function in rules.items():
        if table.get(op) is not function:
            _originals[op] = table.get(op)
            table[op] = function


def _remove(rules):
    table = _dtensor.handlers()
    for op in rules:
        if _originals.get(op) is None:
            table.pop(op, None)
        else:
            table[op] = _originals[op]


def _compiled_graphs():
    """How many graphs dynamo has compiled so far, None where it was never used."""
    if "torch._dynamo" not in sys.modules:
        return None
    return sys.modules["torch._dynamo"].utils.counters["stats"]["unique_graphs"]


def tag_caches():
    """Keeps torch.compile's on-disk caches apart: they key neither the rank nor what the rules are."""
    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")
    tag = f"haloconv {__version__} rules={_state['enabled']} rank={rank}"
    config = torch.compiler.config
    before = config.cache_key_tag or ""
    if _state["tag"] and _state["tag"] in before:
        config.cache_key_tag = before.replace(_state["tag"], tag)
    else:
        config.cache_key_tag = f"{before} {tag}".strip()
    _state["tag"] = tag


def _switch_on():
    _dtensor.probe()
    _install(_forward)
    _install(_backward)
    if not _state["kept_whole"]:
        _dtensor.keep_whole_while_tracing({op.overloadpacket for op in (*_forward, *_backward)})
        _state["kept_whole"] = True
    _missing.watch()


def _switch_off():
    _remove(_forward)
    _missing.unwatch()


def enable_rules():
    """Switches the rules on, for every DTensor program of this process. Idempotent.

    Raises:
        RuntimeError: this torch's DTensor is not one that haloconv knows.
    """
    if _state["enabled"]:
        return
    _switch_on()
    graphs = _compiled_graphs()
    if graphs is not None and graphs != _state["graphs"]:
        torch._dynamo.reset()  # what was compiled without the rules would go on without them
    _state["enabled"] = True
    tag_caches()


def disable_rules():
    """Switches the forward rules off again; torch's own, wrong ones are back. Backward rules stay. Idempotent."""
    if not _state["enabled"]:
        return
    _switch_off()
    _state["enabled"] = False
    _state["graphs"] = _compiled_graphs()
    tag_caches()


def rules_enabled():
    """Whether the rules are on."""
    return _state["enabled"]


@contextlib.contextmanager
def rules():
    """The rules, for the duration of a with block; then whatever was before."""
    before = _state["enabled"]
    enable_rules()
    try:
        yield
    finally:
        if not before:
            disable_rules()


@contextlib.contextmanager
def layer_rules():
    """The rules while a layer of `haloconv.nn` runs, which works without `enable_rules` too."""
    if _state["enabled"]:
        yield
        return
    if torch.compiler.is_compiling():
        raise RuntimeError("haloconv's rules are off, expected haloconv.enable_rules() before torch.compile")
    _switch_on()
    try:
        yield
    finally:
        _switch_off()
