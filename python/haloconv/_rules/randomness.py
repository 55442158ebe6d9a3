"""Random numbers in DTensors: different on different shards, the same on ranks that hold the same.

A draw takes a seed from torch's default generator on the CPU (or the one that the op was given) and a fresh generator
made of it, on the tensor's device:

* along mesh dims that shard the tensor, the rank's coordinate goes into the seed: no two shards repeat each other;
* along the others, all ranks use the first one's seed. Within the forward of a parallelized module in training mode
  they agree beforehand, once (`agree`), so that plain random tensors that a model makes itself are alike too; elsewhere
  each draw agrees by itself, on 8 bytes.

The same seed therefore gives the same numbers at the same world size, and a checkpointed forward, which restores the
default generator, draws the same ones again.
"""

import torch
from torch._library.effects import EffectType

from .._dtensor import Replicate, local_of
from .._layout import Axis, exchanged, placed_like, settled, wrap_as
from .._mesh import group_name
from ._registry import bound, rule

aten = torch.ops.aten

_agreed = []  # what to restore after each forward that is running with an agreed seed


# ---- seeds ----


def _first_ranks(number, rank, world, group):
    """The number that the group's first rank has."""
    if world == 1:
        return number
    axis = Axis(0, 0, world, rank, world, group)
    return int(exchanged(torch.tensor([number]), axis, [(0, 1)] * world))


def _default_states(device_type):
    states = [torch.get_rng_state()]
    if device_type == "cuda":
        states.append(torch.cuda.get_rng_state())
    return states


def agree(mesh):
    """All ranks of the mesh have the same default generators from now on, until `disagree`."""
    if torch._guards.detect_fake_mode() is not None:  # nothing is drawn
        _agreed.append([])
        return
    states = _default_states(mesh.device_type)
    seed = int(torch.randint(2**62, ()))
    states[0] = torch.get_rng_state()  # one draw further: the next forward gets other numbers
    for mesh_dim in range(mesh.ndim):
        rank, world = mesh.get_coordinate()[mesh_dim], mesh.size(mesh_dim)
        seed = _first_ranks(seed, rank, world, group_name(mesh, mesh_dim))
    _agreed.append(states)
    # Not torch.manual_seed: it seeds devices of every kind, and formats a traceback for each that has not started.
    torch.default_generator.manual_seed(seed)
    if mesh.device_type == "cuda":
        torch.cuda.manual_seed(seed)


def disagree():
    """The generators as they were before `agree`."""
    states = _agreed.pop()
    if states:
        torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


# ---- the draw, an op so that a compiled program draws anew each time ----

_library = torch.library.Library("haloconv", "FRAGMENT")
_library.define(
    "_draw(Tensor like, str method, float[] parameters, int[] shard, int[] ranks, int[] worlds, str group_names) -> "
    "Tensor"
)


def _draw(like, method, parameters, shard, ranks, worlds, group_names, generator=None):
    seed = int(torch.randint(2**62, (), generator=generator))
    if not _agreed or generator is not None:
        for rank, world, group in zip(ranks, worlds, group_names.split(",")):
            seed = _first_ranks(seed, rank, world, group)
    for coordinate in shard:
        seed = (seed * 6364136223846793005 + 2 * coordinate + 1442695040888963407) % 2**63
    own = torch.Generator(like.device).manual_seed(seed)
    return getattr(torch.empty_like(like), method)(*parameters, generator=own)


_library.impl("_draw", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("haloconv::_draw", lambda like, *rest: torch.empty_like(like), lib=_library)
torch.library._register_effectful_op("haloconv::_draw", EffectType.ORDERED)


def _drawn(x, like, method, *parameters, generator=None):
    """A tensor like the local `like`, filled by its in-place method, for a tensor that lies as the DTensor `x`."""
    mesh = x.device_mesh
    shard, shared = [], []
    for mesh_dim, placement in enumerate(x.placements):
        if isinstance(placement, Replicate):
            shared.append(mesh_dim)
        else:
            shard.append(mesh.get_coordinate()[mesh_dim])
    arguments = (
        like,
        method,
        [float(parameter) for parameter in parameters],
        shard,
        [mesh.get_coordinate()[mesh_dim] for mesh_dim in shared],
        [mesh.size(mesh_dim) for mesh_dim in shared],
        ",".join(group_name(mesh, mesh_dim) for mesh_dim in shared),
    )
    if generator is not None:
        return _draw(*arguments, generator=generator)
    return torch.ops.haloconv._draw(*arguments)


# ---- rules ----


@rule(
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.uniform_.default,
)
def _in_place(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, generator = a.pop("self"), a.pop("generator")
    local = local_of(x)
    local.copy_(_drawn(x, local, op._opname, *a.values(), generator=generator))
    return x


def _integers(x, like, low, high, generator=None):
    """Uniform integers in [low, high)."""
    doubles = like.to(torch.float64)
    return _drawn(x, doubles, "uniform_", low, high, generator=generator).floor_().clamp_(max=high - 1)


@rule(aten.random_.default, aten.random_.to, getattr(aten.random_, "from"))
def _random(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = a["self"]
    local = local_of(x)
    high = a.get("to")
    if high is None:
        high = 2 if x.dtype == torch.bool else 2 ** min(53, _digits(x.dtype))
    local.copy_(_integers(x, local, a.get("from", 0), high, a["generator"]))
    return x


def _digits(dtype):
    """How many bits of an integer a dtype holds exactly."""
    if dtype.is_floating_point:
        return round(-torch.log2(torch.tensor(torch.finfo(dtype).eps)).item()) + 1
    return torch.iinfo(dtype).bits - (dtype != torch.uint8)


@rule(aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor, aten.bernoulli_.Tensor)
def _bernoulli(op, args, kwargs):
    """With probabilities of its own for each element, or one `p` for all."""
    a = bound(op, args, kwargs)
    x = settled(a["self"])
    local, p = local_of(x), a.get("p", a["self"])
    p = p if isinstance(p, (int, float)) else local_of(placed_like(p, x))
    uniform = _drawn(x, local, "uniform_", generator=a["generator"])
    hits = (uniform < p).to(local.dtype)
    if op is aten.bernoulli_.Tensor:
        local.copy_(hits)
        return a["self"]
    return wrap_as(hits, x.device_mesh, x.placements, x.shape)


@rule(aten.native_dropout.default)
def _dropout(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, p = settled(a["input"]), a["p"]
    local = local_of(x)
    if a["train"] is False or p == 0:
        kept, out = torch.ones_like(local, dtype=torch.bool), local.clone()
    elif p == 1:
        kept, out = torch.zeros_like(local, dtype=torch.bool), torch.zeros_like(local)
    else:
        kept = _drawn(x, torch.empty_like(local, dtype=torch.bool), "bernoulli_", 1 - p)
        out = local * kept * (1 / (1 - p))
    return tuple(wrap_as(tensor, x.device_mesh, x.placements, x.shape) for tensor in (out, kept))


def _like(a):
    """The DTensor that a *_like op is given, and an empty local tensor for its result."""
    x = settled(a["self"])
    options = {name: a[name] for name in ("dtype", "device", "memory_format") if a.get(name) is not None}
    return x, torch.empty_like(local_of(x), **options)


@rule(aten.rand_like.default, aten.randn_like.default)
def _filled_like(op, args, kwargs):
    x, like = _like(bound(op, args, kwargs))
    method = "uniform_" if op is aten.rand_like.default else "normal_"
    return wrap_as(_drawn(x, like, method), x.device_mesh, x.placements, x.shape)


@rule(aten.randint_like.default, aten.randint_like.low_dtype)
def _randint_like(op, args, kwargs):
    a = bound(op, args, kwargs)
    x, like = _like(a)
    drawn = _integers(x, like, a.get("low", 0), a["high"]).to(like.dtype)
    return wrap_as(drawn, x.device_mesh, x.placements, x.shape)


@rule(aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default, aten.rrelu_with_noise_functional.default)
def _rrelu(op, args, kwargs):
    a = bound(op, args, kwargs)
    x = settled(a["self"])
    local, noise = local_of(x), a["noise"]
    lower, upper = a["lower"], a["upper"]
    if not a["training"]:
        slope = torch.full_like(local, (lower + upper) / 2)
    else:
        slope = _drawn(x, local, "uniform_", lower, upper, generator=a["generator"])
    slope = torch.where(local <= 0, slope, 1.0)
    if op is aten.rrelu_with_noise_.default:
        result = local.mul_(slope)
    else:
        result = local * slope
    slope = slope if a["training"] else torch.zeros_like(slope)
    if op is not aten.rrelu_with_noise_functional.default:
        local_of(placed_like(noise, x)).copy_(slope)
    if op is aten.rrelu_with_noise_.default:
        return a["self"]
    result = wrap_as(result, x.device_mesh, x.placements, x.shape)
    if op is aten.rrelu_with_noise_functional.default:
        return result, wrap_as(slope, x.device_mesh, x.placements, x.shape)
    return result
