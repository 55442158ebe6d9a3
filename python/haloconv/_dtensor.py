"""The one place that touches DTensor's private parts.

* handlers: ``DTensor._op_dispatcher._custom_op_handlers`` maps an op to a function that replaces DTensor's own sharding
  propagation for it. It is the only hook that outranks torch's strategies in every release, and it takes effect when
  changed after import.
* specs: a DTensor is built from a local tensor and a DTensorSpec. `DTensor.from_local` does that too, but as an
  autograd function, and below autograd (in a handler) the constructor is the right call.
* implicit replication: plain tensors in DTensor operations count as replicated.

`probe` fails loudly if any of it has moved.
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

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
        stride = stride * torch.sym_max(shape[dim], 1)
    return tuple(strides)


def wrap(local, mesh, placements, shape, channels_last=False):
    """A DTensor of the global `shape` around `local`, below autograd, without communication or checks."""
    return wrap_strided(local, mesh, placements, shape, strides_of(shape, channels_last))


def wrap_strided(local, mesh, placements, shape, stride):
    """`wrap` with the global stride as it is."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def wrap_like(local, dtensor, placements=None):
    """A DTensor with the global shape and strides of `dtensor` around `local`, below autograd."""
    placements = dtensor.placements if placements is None else placements
    return wrap_strided(local, dtensor.device_mesh, placements, dtensor.shape, dtensor.stride())


def is_exactly_shard(placement):
    """Shard, but none of its private kin (_StridedShard), which order the shards differently."""
    return type(placement) is Shard
