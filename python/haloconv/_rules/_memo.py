"""What a rule came down to, for calls that need no more than their op applied to the local tensors.

Most calls of most rules are such: the shards already lie as they have to, and what the rule works out (placements,
global shapes and strides) is the same in each step of a training. A rule that finds so calls `applied`, which keeps the
result's DTensorSpecs under all that they depend on; `known` answers the same call from then on, without the rule.

A call is told from another by its op, the identity of each argument's DTensorSpec (kept ones stay what they are, see
_dtensor.spec_of, and so do those that torch has cached), the strides of its local tensor, and its other arguments with
their types. Local shapes follow from these on a rank. Plain tensors and tensors that are being traced have no key.
"""

import torch

from .._dtensor import DTensor, wrap_spec

_MOST = 16384
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.memory_format, torch.device)
_IN_PLACE = object()  # the result is the first argument
_calls = {}  # key -> (specs of the result, what has to stay alive for the key to stay true)


def _key(op, args, kwargs):
    """None for a call that cannot be kept."""
    key, specs = [op], []
    for value in (*args, *kwargs.items()) if kwargs else args:
        kind = type(value)
        if kind is DTensor:
            local, spec = value._local_tensor, value._spec
            if type(local) is not torch.Tensor:
                return None, specs
            specs.append(spec)
            key.append(id(spec))
            key.append(local.stride())
        elif kind in _PLAIN:
            key.append(kind)
            key.append(value)
        elif kind in (list, tuple) and all(type(item) in _PLAIN for item in value):
            key.append((*map(type, value), *value))
        else:
            return None, specs
    return tuple(key), specs


def known(op, args, kwargs):
    """What a call that is kept gives, in a tuple of one; None where there is none."""
    key, _ = _key(op, args, kwargs)
    specs, _ = _calls.get(key, (None, None)) if key is not None else (None, None)
    if specs is None:
        return None
    results = op(*[x._local_tensor if type(x) is DTensor else x for x in args], **kwargs)
    if specs is _IN_PLACE:
        return (args[0],)
    if type(specs) is not tuple:
        return (wrap_spec(results, specs),)
    return (tuple(None if spec is None else wrap_spec(x, spec) for x, spec in zip(results, specs)),)


def applied(op, args, kwargs, local_args, results, wrapped):
    """Keeps that op(*args, **kwargs) is `wrapped`, DTensors around `results`, which are op(*local_args, **kwargs).
    Not where more has happened: an argument was moved, or a result is another tensor. Returns `wrapped`."""
    key, held = _key(op, args, kwargs)
    if key is None or any(
        (x._local_tensor if type(x) is DTensor else x) is not local for x, local in zip(args, local_args)
    ):
        return wrapped
    if wrapped is args[0]:
        specs = _IN_PLACE
    else:
        many = isinstance(wrapped, tuple)
        pairs = list(zip(wrapped, results)) if many else [(wrapped, results)]
        if any(out is not None and out._local_tensor is not local for out, local in pairs):
            return wrapped
        specs = tuple(None if out is None else out._spec for out, _ in pairs)
        specs = specs if many else specs[0]
    if len(_calls) >= _MOST:
        _calls.clear()
    _calls[key] = specs, held
    return wrapped
