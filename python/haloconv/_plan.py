"""`plan`: the propagation rule as a value, for people, tests and tools. The rule itself is csrc/plan.c."""

import typing

from . import _C
from ._check import as_int, as_pair

Interval = tuple[int, int]
Segment = tuple[int, int, int]


class RankPlan(typing.NamedTuple):
    """What one rank of the group holds, needs, sends and receives. Intervals are (begin, end), end excluded."""

    owned_in: Interval  #: its shard of the input
    owned_out: Interval  #: its shard of the output
    needed: Interval  #: the input that its output reads: within [0, size), or unclipped when periodic
    pad_left: int  #: padding columns before `needed`
    pad_right: int  #: padding columns after it
    sends: list[Segment]  #: (peer, begin, end), in the input's coordinates, sorted by peer
    recvs: list[Segment]  #: likewise


class Plan(typing.NamedTuple):
    """The plan of one dimension."""

    out_size: int  #: global size of the output
    ranks: list[RankPlan]


def plan(
    size,
    world,
    kernel,
    stride=1,
    padding=0,
    dilation=1,
    *,
    transposed=False,
    output_padding=0,
    periodic=False,
):
    """How a window operation over one sharded dimension is split.

    Shards follow torch.chunk's rule, input and output each by its own global size. The needed interval of a
    convolution is ``[o0*stride - left, (o1-1)*stride - left + dilation*(kernel-1) + 1)`` for the outputs [o0, o1),
    clipped to the input; that of a transposed convolution is the smallest one that holds every input that touches
    them. Every rank computes every rank's plan; nothing is negotiated.

    Args:
        size: global size of the input, >= 0.
        world: number of ranks that the dimension is sharded over, >= 1.
        kernel, stride, dilation: of the window, >= 1.
        padding: an int, or (left, right); negative padding crops.
        transposed: plan a transposed convolution.
        output_padding: of a transposed convolution, < max(stride, dilation).
        periodic: circular padding: the needed interval wraps around.

    Returns:
        A `Plan`.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument does not fit; the message names it, its value and what was expected.
    """
    left, right = as_pair("padding", padding)
    out_size, ranks = _C.plan(
        as_int("size", size),
        as_int("world", world),
        as_int("kernel", kernel),
        as_int("stride", stride),
        left,
        right,
        as_int("dilation", dilation),
        as_int("output_padding", output_padding),
        bool(transposed),
        bool(periodic),
    )
    return Plan(out_size, [RankPlan(*rank) for rank in ranks])
