"""The one place that touches DTensor's private parts.

* handlers: ``DTensor._op_dispatcher._custom_op_handlers`` maps an op to a function that replaces DTensor's own sharding
  propagation for it. It is the only hook that outranks torch's strategies in every release, and it takes effect when
  changed after import.
* specs: a DTensor is built from a local tensor and a DTensorSpec. `DTensor.from_local` does that too, but as an
  autograd function, and below autograd (in a handler) the constructor is the right call.
* propagation: ``_propagate_op_sharding_dispatch_slow_path`` is where DTensor decides how an op's inputs have to lie,
  for every combination that it has not cached. What it returns, if it is no decision, is taken for the op's result.
* Python kernels: while a graph is traced, some ops are replaced above autograd by Python decompositions
  (``OpOverload.py_kernels``), which index the whole of a tensor. DTensors are kept from them.
* implicit replication: plain tensors in DTensor operations count as replicated.

`probe` fails loudly if any of it has moved.
"""

import functools

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves

__all__ = ["DTensor", "Partial", "Replicate", "Shard"]


def probe():
    """Checks that what this module relies on is there; raises RuntimeError with the torch version otherwise."""
    dispatcher = getattr(DTensor, "_op_dispatcher", None)
    missing = [
        name
        for name, there in {
            "DTensor._op_dispatcher._custom_op_handlers": isinstance(
                getattr(dispatcher, "_custom_op_handlers", None), dict
            ),
            "DTensor._op_dispatcher._allow_implicit_replication": hasattr(
                dispatcher, "_allow_implicit_replication"
            ),
            "DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path": hasattr(
                dispatcher, "_propagate_op_sharding_dispatch_slow_path"
            ),
            "torch._C._clear_DTensor_sharding_propagator_cache": hasattr(
                torch._C, "_clear_DTensor_sharding_propagator_cache"
            ),
            "DTensorSpec.tensor_meta": "tensor_meta" in DTensorSpec.__dataclass_fields__,
            "DTensor._local_tensor": "_local_tensor" in DTensor.__slots__,
        }.items()
        if not there
    ]
    if missing:
        raise RuntimeError(
            f"haloconv does not know this torch ({torch.__version__}): {', '.join(missing)} moved. "
            "Use a release that the README lists, or a newer haloconv."
        )


def handlers():
    """The table op -> handler(op, args, kwargs)."""
    return DTensor._op_dispatcher._custom_op_handlers


def intercept_propagation(decide):
    """From now on ``decide(propagate, op, args, kwargs)`` stands in for DTensor's own decision `propagate()`."""
    dispatcher = DTensor._op_dispatcher
    propagate = type(dispatcher)._propagate_op_sharding_dispatch_slow_path.__get__(dispatcher)

    def intercepted(op, args, kwargs, *rest):
        return decide(lambda: propagate(op, args, kwargs, *rest), op, args, kwargs)

    dispatcher._propagate_op_sharding_dispatch_slow_path = intercepted
    torch._C._clear_DTensor_sharding_propagator_cache()  # decisions that nobody has looked at


def release_propagation():
    """Undoes `intercept_propagation`."""
    DTensor._op_dispatcher.__dict__.pop("_propagate_op_sharding_dispatch_slow_path", None)


def redistributed_specs(decision, args, kwargs):
    """(spec before, spec after) of the arguments that a decision of DTensor's redistributes."""
    if not getattr(decision, "needs_redistribute", False) or decision.redistribute_schema is None:
        return []
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
    after = decision.redistribute_schema
    specs = [x for x in tree_leaves((after.args_schema, after.kwargs_schema)) if isinstance(x, DTensorSpec)]
    return [(x._spec, spec) for x, spec in zip(tensors, specs)]


def orders_shards_anew(decision):
    """Whether a decision of DTensor's gives an output a placement of Shard's private kin."""
    specs = [x for x in tree_leaves(getattr(decision, "output_spec", None)) if isinstance(x, DTensorSpec)]
    # Partial has private kin too (a norm's), which orders nothing.
    return any(
        not (is_exactly_shard(placement) or isinstance(placement, (Partial, Replicate)))
        for spec in specs
        for placement in spec.placements
    )


def keep_whole_while_tracing(packets):
    """From now on no overload of these ops is decomposed for a DTensor before DTensor sees it."""
    for packet in packets:
        for name in packet.overloads():
            op = getattr(packet, name)
            for key, kernel in list(op.py_kernels.items()):
                if not hasattr(kernel, "_haloconv"):
                    op.py_kernels[key] = _for_plain_tensors(op, kernel)
            op._dispatch_cache.clear()


def _for_plain_tensors(op, kernel):
    @functools.wraps(kernel)
    def choose(*args, **kwargs):
        if any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
            with torch._C._DisablePythonDispatcher():
                return op(*args, **kwargs)
        return kernel(*args, **kwargs)

    choose._haloconv = True
    return choose


def allow_implicit_replication():
    """From now on a plain tensor beside a DTensor counts as replicated, in forward and in backward."""
    DTensor._op_dispatcher._allow_implicit_replication = True


def local_of(dtensor):
    """The local tensor, below autograd."""
    return dtensor._local_tensor


def strides_of(shape, channels_last):
    """Dense strides of a global shape."""
    order = list(range(len(shape) - 1, -1, -1))
    if channels_last:
        order.remove(1)
        order.insert(0, 1)
    strides, stride = [0] * len(shape), 1
    for dim in order:
        strides[dim] = stride
        stride = stride * at_least_one(shape[dim])
    return tuple(strides)


def at_least_one(size):
    """max(size, 1), also of a symbol, for which torch has a function that takes its time."""
    return max(size, 1) if type(size) is int else torch.sym_max(size, 1)


def wrap(local, mesh, placements, shape, channels_last=False):
    """A DTensor of the global `shape` around `local`, below autograd, without communication or checks."""
    return wrap_strided(local, mesh, placements, shape, strides_of(shape, channels_last))


_specs = {}
_MOST_SPECS = 16384


def spec_of(mesh, placements, shape, stride, dtype):
    """What `wrap_spec` takes. A model needs the same few hundred in each step, so they are kept."""
    placements, shape, stride = tuple(placements), torch.Size(shape), tuple(stride)
    key = (
        id(mesh),
        placements,
        shape,
        stride,
        dtype,
    )  # a kept spec holds its mesh, so that its id stays its own
    try:
        spec = _specs.get(key)
    except TypeError:  # symbolic sizes have no hash
        return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))
    if spec is None:
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))
        if len(_specs) >= _MOST_SPECS:
            _specs.clear()
        _specs[key] = spec
    return spec


def wrap_spec(local, spec):
    """A DTensor around `local`, below autograd, without communication or checks."""
    # Without DTensor.__init__, which does nothing, by a detour through dynamo that takes three times as long as this.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def wrap_strided(local, mesh, placements, shape, stride):
    """`wrap` with the global stride as it is."""
    return wrap_spec(local, spec_of(mesh, placements, shape, stride, local.dtype))


def is_exactly_shard(placement):
    """Shard, but none of its private kin (_StridedShard), which order the shards differently."""
    return type(placement) is Shard
