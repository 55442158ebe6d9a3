"""Arguments for every op, shared by the tests of the ops."""

import torch
import torch.distributed as dist


def world_one():
    """(world, rank, group name) arguments of a group of one."""
    return dist.group.WORLD.group_name


def conv_args(
    nd,
    *,
    stride=1,
    pad=(1, 1),
    dilation=1,
    transposed=False,
    output_padding=0,
    groups=1,
    periodic=0,
    sizes=(),
    dims=None,
):
    """The arguments of haloconv::convolution after input, weight and bias, with `dims` sharded over a group
    of one."""
    dims = list(range(2, 2 + nd)) if dims is None else dims
    name = world_one()
    return (
        [stride] * nd,
        list(pad) * nd,
        [dilation] * nd,
        transposed,
        [output_padding] * nd,
        groups,
        [periodic] * nd,
        dims,
        [sizes[d - 2] for d in dims],
        [0] * len(dims),
        [1] * len(dims),
        ",".join([name] * len(dims)),
    )


def samples():
    """(name, op, arguments that need a gradient first) covering every op that has a schema of tensors."""
    import haloconv

    assert haloconv
    ops = torch.ops.haloconv
    group = world_one()
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    made = []
    for window, transposed, periodic, size in [
        ([3, 1, 1, 1, 1, 0], False, False, 5),
        ([5, 2, 2, 0, 2, 0], False, False, 11),
        ([2, 3, 0, 0, 1, 0], False, False, 7),
        ([3, 2, 1, 1, 1, 1], True, False, 4),
        ([3, 1, 2, 1, 1, 0], False, True, 5),
    ]:
        plan = haloconv.plan(
            size,
            1,
            window[0],
            window[1],
            (window[2], window[3]),
            window[4],
            transposed=transposed,
            output_padding=window[5],
            periodic=periodic,
        ).ranks[0]
        extent = plan.pad_left + plan.needed[1] - plan.needed[0] + plan.pad_right
        made.append(
            (
                "halo_exchange",
                ops.halo_exchange.default,
                (random(2, size, 3), 1, size, window, transposed, periodic, 0.0, 0, 1, group),
            )
        )
        made.append(
            (
                "halo_reduce",
                ops.halo_reduce.default,
                (random(2, extent, 3), 1, size, window, transposed, periodic, 0, 1, group),
            )
        )
    for extents, periodic in [([-2, 7], False), ([1, 4], False), ([3, 8], True), ([2, 2], False)]:
        length = extents[1] - extents[0]
        place = (0, 1, group)
        made.append(
            ("exchange", ops.exchange.default, (random(2, 5, 3), 1, 5, extents, periodic, 0.0, *place))
        )
        made.append(
            (
                "exchange_reduce",
                ops.exchange_reduce.default,
                (random(2, length, 3), 1, 5, extents, periodic, *place),
            )
        )
    for shape in ((3, 2), (), (0,)):
        made.append(("all_reduce", ops.all_reduce.default, (random(*shape), "sum", 0, 1, group)))
    for nd, options, channels in [
        (1, {}, (2, 3)),
        (2, {}, (2, 3)),
        (2, dict(stride=2, pad=(1, 0)), (2, 2)),
        (2, dict(groups=2), (2, 2)),
        (2, dict(dilation=2, pad=(2, 2)), (1, 2)),
        (2, dict(transposed=True, stride=2, output_padding=1), (2, 3)),
        (3, {}, (1, 2)),
        (1, dict(periodic=1), (1, 2)),
        (2, dict(dims=[]), (1, 2)),
        (2, dict(dims=[3]), (1, 2)),
        (2, dict(dims=[3], periodic=1), (1, 2)),
    ]:
        sizes = (5, 4, 3)[:nd]
        groups = options.get("groups", 1)
        transposed = options.get("transposed", False)
        per_group = (
            (channels[0], channels[1] // groups) if transposed else (channels[1], channels[0] // groups)
        )
        weight = random(*per_group, *[3] * nd)
        args = conv_args(nd, sizes=sizes, **options)
        x = random(2, channels[0], *sizes)
        for bias in ([random(channels[1])], []):
            made.append(("convolution", ops.convolution.default, (x, weight, bias, *args)))
        out = ops.convolution(x, weight, [], *args)
        for needs in ((True, True, True), (True, False, False), (False, True, True)):
            made.append(
                (
                    "convolution_backward",
                    ops.convolution_backward.default,
                    (random(*out.shape), x, weight, *args, *needs),
                )
            )
    return made


def require_grad(value):
    if isinstance(value, torch.Tensor):
        return value.clone().requires_grad_()
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [v.clone().requires_grad_() for v in value]
    return value


def wrong_calls():
    """(what is wrong, a call that C has to refuse)."""
    ops = torch.ops.haloconv
    group = world_one()
    x, weight = torch.ones(1, 2, 5, 4), torch.ones(3, 2, 3, 3)
    good = conv_args(2, sizes=(5, 4))

    def conv(**changes):
        names = [
            "stride",
            "padding",
            "dilation",
            "transposed",
            "output_padding",
            "groups",
            "periodic",
            "dims",
            "sizes",
            "ranks",
            "worlds",
            "group_names",
        ]
        return ops.convolution(
            x, weight, [], *[changes.get(name, value) for name, value in zip(names, good, strict=True)]
        )

    def exchange(tensor=x, dim=3, size=4, window=(3, 1, 1, 1, 1, 0), rank=0, world=1, name=group):
        return ops.halo_exchange(tensor, dim, size, list(window), False, False, 0.0, rank, world, name)

    def reduce(tensor=x, reduction="sum", rank=0, world=1):
        return ops.all_reduce(tensor, reduction, rank, world, group)

    def read(extents, tensor=x, size=4, rank=0, world=1):
        return ops.exchange(tensor, 3, size, extents, False, 0.0, rank, world, group)

    return [
        ("extents", lambda: read([0])),
        ("extents", lambda: read([0, 4, 0, 4])),
        ("extent", lambda: read([3, 2])),
        ("extent", lambda: read([0, 2**40])),
        ("size", lambda: read([0, 2], size=3)),
        ("rank", lambda: read([0, 2], rank=1)),
        ("reduction", lambda: reduce(reduction="median")),
        ("rank", lambda: reduce(rank=-1)),
        ("world", lambda: reduce(world=0)),
        ("stride", lambda: conv(stride=[0, 1])),
        ("stride|padding", lambda: conv(stride=[1])),
        ("stride", lambda: conv(stride=[1, 1, 1, 1, 1])),
        ("padding", lambda: conv(padding=[1, 1])),
        ("dilation", lambda: conv(dilation=[1, 0])),
        ("groups", lambda: conv(groups=0)),
        ("groups", lambda: conv(groups=5)),
        ("dims", lambda: conv(dims=[2, 9])),
        ("rank", lambda: conv(ranks=[0, 7])),
        ("world", lambda: conv(worlds=[1, 0])),
        ("bias", lambda: ops.convolution(x, weight, [torch.ones(3), torch.ones(3)], *good)),
        ("channels|weight", lambda: ops.convolution(x, torch.ones(3, 5, 3, 3), [], *good)),
        ("weight|dim", lambda: ops.convolution(x, torch.ones(3, 2, 3), [], *good)),
        ("dim", lambda: exchange(dim=4)),
        ("dim", lambda: exchange(dim=-1)),
        ("size|4", lambda: exchange(size=5)),
        ("size", lambda: exchange(size=-1)),
        ("kernel", lambda: exchange(window=(0, 1, 1, 1, 1, 0))),
        ("window", lambda: exchange(window=(3, 1, 1))),
        ("rank", lambda: exchange(rank=1)),
        ("world", lambda: exchange(world=0)),
        ("group", lambda: exchange(tensor=torch.ones(1, 2, 5, 2), world=2, name="no such group")),
    ]


def count_wrong_calls():
    return len(wrong_calls())
