"""Checks of arguments. Their messages name the argument, its value, what was expected and, where the process is part of
a group, the rank."""

import operator

import torch.distributed as dist

_LARGEST = 2**30  # HC_LARGEST in csrc/plan.h


def on_rank():
    """' (rank 2)' in a distributed job, '' elsewhere: the end of an error message."""
    if dist.is_available() and dist.is_initialized():
        return f" (global rank {dist.get_rank()})"
    return ""


def name_rank(error):
    """Ends the message of an error that was raised where no rank is known, by torch perhaps, with the rank."""
    text = error.args[0] if error.args else None
    known = isinstance(error, (ValueError, TypeError, IndexError, RuntimeError)) and isinstance(text, str)
    if known and "global rank" not in text and "on rank" not in text:
        error.args = (text + on_rank(), *error.args[1:])


def as_bool(name, value):
    """True or False; what merely counts as one is refused."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected True or False{on_rank()}")
    return value


def as_int(name, value):
    """An exact integer; bools and floats are refused."""
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected an integer{on_rank()}")
    try:
        integer = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an integer{on_rank()}") from None
    if abs(integer) > _LARGEST:
        raise ValueError(f"{name} is {integer}, expected at most {_LARGEST} in magnitude{on_rank()}")
    return integer


def as_pair(name, value):
    """An int for both sides, or (left, right)."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"{name} is {value!r}, expected an integer or (left, right){on_rank()}")
        return as_int(name, value[0]), as_int(name, value[1])
    value = as_int(name, value)
    return value, value
