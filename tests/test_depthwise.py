"""Depthwise convolutions of CPU tensors by the C core's own loops, against ATen in float64.

Most tests go through torch.ops.haloconv with the mode "on" and look at the counters, so that ATen cannot stand in. What
the ops do not reach yet (inputs in pieces, boxes of outputs, the loops of older processors) is called by ctypes, in a
library that is compiled here from the same sources.
"""

import ctypes
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import switched
from test_ops_memory import sanitized

pytestmark = [pytest.mark.core, pytest.mark.own]

CONV = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
# Relative to the largest value: some hundred roundings of the type that is summed in, and one of the stored type.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 5e-3}
PASSES = ("forward", "input_gradient", "weight_gradient")


def mode(name):
    return switched("depthwise", name)


def window_args(stride, padding, dilation, groups, transposed=False):
    nd = len(stride)
    both = [p for p in padding for _ in range(2)]
    return (list(stride), both, list(dilation), transposed, [0] * nd, groups, [0] * nd, [], [], [], [], "")


def passes(x, weight, bias, grad, *window):
    """(output, input gradient, weight gradient), and how many passes the own loops ran."""
    import haloconv
    from haloconv import _C

    assert haloconv
    ops, args = torch.ops.haloconv, window_args(*window, x.shape[1])
    before = _C.depthwise_counts()
    out = ops.convolution(x, weight, [] if bias is None else [bias], *args)
    of_input, of_weight, _ = ops.convolution_backward(grad, x, weight, *args, True, True, False)
    return (out, of_input, of_weight), {k: v - before[k] for k, v in _C.depthwise_counts().items()}


def exact(x, weight, bias, grad, *window):
    """The same in float64 by ATen; dense inputs, for ATen's own sake."""
    nd = x.dim() - 2
    x, weight, grad = (t.double().contiguous() for t in (x, weight, grad))
    bias = None if bias is None else bias.double()
    out = CONV[nd](x, weight, bias, *window, x.shape[1])
    args = (*(list(v) for v in window), False, [0] * nd, x.shape[1], [True, True, False])
    return out, *torch.ops.aten.convolution_backward(grad, x, weight, None, *args)[:2]


def assert_near(got, expected, what, roundings=1):
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    worst = float((got.double() - expected).abs().max()) if expected.numel() else 0.0
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    assert worst <= roundings * TOLERANCE[got.dtype] * max(scale, 1e-3), (
        f"{what}: off by {worst}, of at most {scale}"
    )


def out_size(size, kernel, stride, padding, dilation):
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )


def make(generator, shape, dtype, form="dense"):
    """A random tensor; `form` says how it lies."""

    def random_tensor(*sizes):
        return torch.randn(sizes, dtype=torch.float64, generator=generator).to(dtype)

    if form == "last" and len(shape) > 3:
        return random_tensor(*shape).contiguous(memory_format=LAST[len(shape) - 2])
    if form == "sliced":  # every second column of a wider tensor, and a channel too many
        wide = random_tensor(shape[0], shape[1] + 1, *shape[2:-1], 2 * shape[-1] + 1)
        return wide[:, 1:, ..., 1 : 2 * shape[-1] + 1 : 2][..., : shape[-1]]
    if form == "sliced last" and len(shape) > 3:  # channels lie together, pixels don't
        wide = random_tensor(shape[0], *shape[2:], shape[1] + 3)
        return wide[..., 2 : 2 + shape[1]].movedim(-1, 1)
    if form == "turned" and len(shape) > 3:
        return random_tensor(*shape[:2], *reversed(shape[2:])).permute(0, 1, *reversed(range(2, len(shape))))
    if form == "expanded":
        return random_tensor(1, shape[1], *[1] * (len(shape) - 2)).expand(shape)
    return random_tensor(*shape)


def random_case(rng, nd):
    kernel = tuple(rng.choice([1, 2, 3, 5, 7] if nd < 3 else [1, 2, 3, 3, 5]) for _ in range(nd))
    stride = tuple(rng.choice([1, 1, 2, 3]) for _ in range(nd))
    dilation = tuple(rng.choice([1, 1, 2, 3]) for _ in range(nd))
    padding = tuple(rng.choice([0, k // 2, d * (k // 2), 5]) for k, d in zip(kernel, dilation, strict=True))
    more = [0, 1, 2, 13, 29] if nd < 3 else [0, 1, 4, 9]
    size = tuple(
        max(1, d * (k - 1) + 1 - 2 * p) + rng.choice(more)
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    )
    channels = rng.choice([2, 3, 7, 8, 16, 17, 31, 40])
    return (rng.choice([1, 1, 2, 3]), channels, *size), kernel, (stride, padding, dilation)


def check_case(generator, shape, kernel, window, dtype, form, grad_form, bias=True):
    x = make(generator, shape, dtype, form)
    weight = make(generator, (shape[1], 1, *kernel), dtype)
    grad = make(generator, (*shape[:2], *out_size(shape[2:], kernel, *window)), dtype, grad_form)
    b = make(generator, (shape[1],), dtype) if bias else None
    what = f"{shape} kernel {kernel} window {window} {dtype} {form} {grad_form}"
    with mode("on"):
        got, counts = passes(x, weight, b, grad, *window)
    assert counts == dict.fromkeys(PASSES, 1), (what, counts)
    for name, value, right in zip(PASSES, got, exact(x, weight, b, grad, *window), strict=True):
        assert value.dtype == dtype
        assert_near(value, right, f"{name} of {what}")
    return got


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("nd", [1, 2, 3])
def test_random_windows(nd, dtype):
    """Fails when some window, size or memory format gives a wrong number: the census of what goes wrong by one."""
    rng = random.Random(100 * nd)
    generator = torch.Generator().manual_seed(nd)
    for _ in range(40 if sanitized() else 120):
        shape, kernel, window = random_case(rng, nd)
        forms = [rng.choice(["dense", "last"]) for _ in range(2)]
        check_case(generator, shape, kernel, window, dtype, *forms, bias=rng.random() < 0.5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_strides(dtype):
    """Fails when a tensor that is not dense is read as if it were."""
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    forms = ["sliced", "sliced last", "turned", "expanded", "dense", "last"]
    for index in range(36):
        shape, kernel, window = random_case(rng, 2 + index // 18)
        check_case(generator, shape, kernel, window, dtype, forms[index % 6], forms[index // 6 % 6])


@pytest.mark.parametrize("form", ["dense", "last"])
@pytest.mark.parametrize("shape", [(2, 48, 70, 150), (1, 20, 200, 9), (1, 3, 9, 1300), (1, 5, 33, 20, 40)])
def test_several_tiles(shape, form):
    """Fails when tiles do not meet: each of these is cut along height, width or depth."""
    generator = torch.Generator().manual_seed(0)
    nd = len(shape) - 2
    for kernel, stride in [(7, 1), (3, 2), (5, 3)]:
        window = (stride,) * nd, (kernel // 2,) * nd, (1,) * nd
        check_case(generator, shape, (kernel,) * nd, window, torch.float64, form, form)


@pytest.mark.parametrize("shape", [(2, 12, 9, 11), (2, 1, 9, 11), (2, 12, 1, 1), (2, 12, 9), (1, 4, 5, 6, 7)])
@pytest.mark.parametrize("form", ["dense", "last", "turned", "sliced last"])
def test_memory_format_is_atens(shape, form):
    """Fails when the output or a gradient lies otherwise than without the own loops."""
    generator = torch.Generator().manual_seed(0)
    nd = len(shape) - 2
    x = make(generator, shape, torch.float32, form)
    weight = make(generator, (shape[1], 1, *[3] * nd), torch.float32)
    window = (1,) * nd, (1,) * nd, (1,) * nd
    results = {}
    for name in ("off", "on"):
        with mode(name):
            results[name], counts = passes(x, weight, None, x, *window)
        assert set(counts.values()) == {int(name == "on" and shape[1] > 1)}
    for what, ours, atens in zip(PASSES, results["on"], results["off"], strict=True):
        assert ours.stride() == atens.stride(), what


def test_what_is_left_to_aten():
    """Fails when the loops take a convolution that is not depthwise, or of a type that they don't know."""
    generator = torch.Generator().manual_seed(0)
    window = (1, 1), (1, 1), (1, 1)

    def counts(x, weight, groups, transposed=False, bias=None):
        from haloconv import _C

        args = window_args(*window, groups, transposed)
        before = _C.depthwise_counts()
        out = torch.ops.haloconv.convolution(x, weight, [] if bias is None else [bias], *args)
        torch.ops.haloconv.convolution_backward(out, x, weight, *args, True, True, False)
        return _C.depthwise_counts() == before

    x = make(generator, (2, 4, 6, 7), torch.float32)
    with mode("on"):
        assert not counts(x, make(generator, (4, 1, 3, 3), torch.float32), 4)
        assert counts(x, make(generator, (8, 1, 3, 3), torch.float32), 4), "a channel multiplier"
        assert counts(x, make(generator, (4, 2, 3, 3), torch.float32), 2), "groups of two"
        assert counts(x, make(generator, (4, 1, 3, 3), torch.float32), 4, transposed=True)
        assert counts(x[:0], make(generator, (4, 1, 3, 3), torch.float32), 4), "an empty batch"
        assert counts(x.half(), make(generator, (4, 1, 3, 3), torch.float16), 4)
    with mode("off"):
        assert counts(x, make(generator, (4, 1, 3, 3), torch.float32), 4)


def test_windows_too_wide_for_a_tile_are_left_to_aten():
    """Fails when a huge dilation is refused, or takes memory for all that it spans."""
    generator = torch.Generator().manual_seed(0)
    x, weight = make(generator, (1, 2, 700_001), torch.float64), make(generator, (2, 1, 3), torch.float64)
    window = (1,), (0,), (350_000,)
    grad = make(generator, (1, 2, 1), torch.float64)
    with mode("on"):
        got, counts = passes(x, weight, None, grad, *window)
    assert counts["forward"] in (0, 1)
    for name, value, right in zip(PASSES, got, exact(x, weight, None, grad, *window), strict=True):
        assert_near(value, right, name)


@pytest.mark.parametrize("form", ["dense", "last"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_threads_change_nothing(dtype, form):
    """Fails when a result depends on the number of threads, be it by one bit."""
    generator = torch.Generator().manual_seed(0)
    x = make(generator, (3, 24, 40, 56), dtype, form)
    weight = make(generator, (24, 1, 5, 5), dtype)
    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            with mode("on"):
                results.append(passes(x, weight, None, x, (1, 1), (2, 2), (1, 1))[0])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("form", ["dense", "last"])
def test_weight_gradient_is_as_accurate_as_atens(form):
    """Fails when float32 sums over a whole activation lose more than ATen's do (both against float64)."""
    generator = torch.Generator().manual_seed(0)
    # not centred: a sum that grows shows how it is accumulated
    x = make(generator, (2, 8, 160, 192), torch.float32, form).abs()
    weight = make(generator, (8, 1, 3, 3), torch.float32)
    window = (1, 1), (1, 1), (1, 1)
    right = exact(x, weight, None, x, *window)[2]
    errors = {}
    for name in ("off", "on"):
        with mode(name):
            got = passes(x, weight, None, x, *window)[0][2]
        errors[name] = float((got.double() - right).abs().max() / right.abs().max())
    # an ulp of the largest value is what storing it costs
    assert errors["on"] <= max(errors["off"], 2**-23), errors


def test_bfloat16_rounds_as_torch_does():
    """Fails when a sum is cut instead of rounded to nearest even, or a NaN or an infinity gets lost."""
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3.4e38, 1e-40], dtype=torch.bfloat16)
    values = torch.cat([special, torch.randn(2041).to(torch.bfloat16)]).reshape(1, 2, 1, 1024)
    bias = torch.tensor([0.0, 0.001], dtype=torch.bfloat16)
    weight = torch.ones(2, 1, 1, 1, dtype=torch.bfloat16)
    with mode("on"):
        (got, *_), counts = passes(values, weight, bias, values, (1, 1), (0, 0), (1, 1))
    assert counts["forward"] == 1
    expected = (values.float() + bias.float().reshape(1, 2, 1, 1)).to(torch.bfloat16)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_mode_and_environment():
    """Fails when the switch is not what its documentation says."""
    from haloconv import _C

    with pytest.raises(ValueError, match="name is 'fast', expected 'auto', 'off' or 'on'"):
        _C.depthwise("fast")
    with mode("off"):
        assert _C.depthwise() == "off"
    if sanitized():
        return  # the child would need the sanitizer preloaded before all else
    code = "import torch, haloconv; from haloconv import _C; print(_C.depthwise())"
    for value, good in (("off", True), ("on", True), ("fast", False)):
        environment = dict(os.environ, HALOCONV_DEPTHWISE=value)
        done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True)
        if good:
            assert done.stdout.strip() == value, done
        else:
            assert "HALOCONV_DEPTHWISE is 'fast', expected 'auto', 'off' or 'on'" in done.stderr


# ------------------------------------------------------------------------------------------------ by ctypes


class Conv(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_int),
        ("batch", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        *[(name, ctypes.c_int64 * 3) for name in ("kernel", "stride", "dilation", "padding")],
    ]


class Source(ctypes.Structure):
    _fields_ = [
        ("dim", ctypes.c_int64),
        ("base", ctypes.c_void_p * 3),
        ("bounds", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 5 * 3),
        ("sizes", ctypes.c_int64 * 3),
    ]


class Target(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 5),
        ("begin", ctypes.c_int64 * 3),
        ("end", ctypes.c_int64 * 3),
    ]


class Weight(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("strides", ctypes.c_int64 * 4)]


class Status(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("message", ctypes.c_char * 1024)]


C_DTYPE = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """The loops as a library of their own, in which the bytes of the widest vector are a variable."""
    sources = Path(__file__).resolve().parent.parent / "csrc"
    folder = tmp_path_factory.mktemp("depthwise")
    target, limit = folder / "depthwise.so", folder / "limit.c"
    limit.write_text("int simd_bytes = 64;\n")
    names = ["depthwise.c", "depthwise_simd.c", "depthwise_tile.c", "shard.c", "status.c"]
    sanitizers = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]  # -O1 takes a minute
    flags = sanitizers if sanitized() else ["-O1"]
    declared = folder / "limit.h"
    declared.write_text("extern int simd_bytes;\n")
    command = ["gcc", "-std=c11", "-g", "-shared", "-fPIC", *flags]
    command += ["-include", str(declared), "-DHC_SIMD_BYTES=simd_bytes", "-o", str(target), str(limit)]
    torch_libraries = Path(torch.__file__).parent / "lib"
    command += [*[str(sources / name) for name in names], f"-L{torch_libraries}", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module", params=[16, 32, 64])
def library(request, loops):
    """The loops with vectors of at most so many bytes, as a processor without wider ones runs them."""
    ctypes.c_int.in_dll(loops, "simd_bytes").value = request.param
    return loops


def call(function, *args):
    status = Status()
    references = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in args]
    assert function(*references, ctypes.byref(status)) == 0, status.message


def in_pieces(whole, dim, cuts, origin, lies):
    """`whole` as a source in pieces that lie apart, each in a memory format of its own; a piece of zeros is missing.
    Columns count from `origin`. Returns (source, what must stay alive)."""
    edges = [0, *cuts, whole.shape[2 + dim]]
    source = Source(dim=dim, bounds=(ctypes.c_int64 * 4)(*[e - origin for e in edges]))
    source.sizes[:] = whole.shape[2:]
    kept = []
    for i in range(3):
        part = whole.narrow(2 + dim, edges[i], edges[i + 1] - edges[i])
        if not part.any():
            continue
        part = part.contiguous(memory_format=lies[i])
        kept.append(part)
        source.base[i] = part.data_ptr()
        source.strides[i][:] = part.stride()
    return source, kept


def weight_of(tensor):
    strides = tensor.stride()
    return Weight(base=tensor.data_ptr(), strides=(ctypes.c_int64 * 4)(strides[0], *strides[2:]))


def boxes(shape, dim, cut):
    """The box of all outputs, cut in two along `dim`."""
    for begin, end in ((0, cut), (cut, shape[dim])):
        lo, hi = [0, 0, 0], list(shape)
        lo[dim], hi[dim] = begin, end
        yield lo, hi


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_pieces_are_the_assembled_input(library, dim, dtype):
    """Fails when a window across the edge of a piece reads the wrong column, when a missing piece isn't zeros, or when
    the outputs of two boxes are not those of one."""
    rng = random.Random(dim)
    generator = torch.Generator().manual_seed(dim)
    for _ in range(6 if sanitized() else 15):
        channels, stride = rng.choice([3, 16, 21]), [rng.choice([1, 1, 2]) for _ in range(3)]
        kernel = [rng.choice([1, 3, 5]) for _ in range(3)]
        dilation = [rng.choice([1, 1, 2]) for _ in range(3)]
        padding = [rng.choice([0, d * (k // 2)]) for k, d in zip(kernel, dilation, strict=True)]
        size = [
            max(5, d * (k - 1) + 1) + rng.choice([0, 3, 8]) for k, d in zip(kernel, dilation, strict=True)
        ]
        window = (stride, padding, dilation)
        x = make(generator, (2, channels, *size), dtype)
        weight, bias = make(generator, (channels, 1, *kernel), dtype), make(generator, (channels,), dtype)
        grad = make(generator, (2, channels, *out_size(size, kernel, *window)), dtype)
        sources, kept = {}, []
        for name, tensor in (("x", x), ("grad", grad)):
            n = tensor.shape[2 + dim]
            cuts = sorted(rng.randint(0, n) for _ in range(2))
            if rng.random() < 0.4:
                tensor.narrow(2 + dim, cuts[1], n - cuts[1]).zero_()
            lies = [rng.choice([torch.contiguous_format, torch.channels_last_3d]) for _ in range(3)]
            sources[name], parts = in_pieces(tensor, dim, cuts, 0, lies)
            kept += parts
        right = exact(x, weight, bias, grad, *window)
        last = rng.random() < 0.5
        form = torch.channels_last_3d if last else torch.contiguous_format
        conv = Conv(dtype=C_DTYPE[dtype], batch=2, channels=channels)
        conv.kernel[:], conv.stride[:], conv.dilation[:], conv.padding[:] = kernel, stride, dilation, padding
        out, of_input = (torch.full_like(t, math.nan, memory_format=form) for t in (grad, x))
        of_weight = torch.full_like(weight, math.nan)
        what = f"{x.shape} {kernel} {window} {dtype} last={last}"
        for tensor, of in ((out, "forward"), (of_input, "input_gradient")):
            shape = tensor.shape[2:]
            for lo, hi in boxes(shape, dim, rng.randint(0, shape[dim])):
                target = Target(base=tensor.data_ptr())
                target.strides[:], target.begin[:], target.end[:] = tensor.stride(), lo, hi
                if of == "forward":
                    pointers = ctypes.c_void_p(bias.data_ptr()), ctypes.c_int64(1)
                    call(
                        library.hc_depthwise_forward, conv, sources["x"], weight_of(weight), *pointers, target
                    )
                else:
                    call(
                        library.hc_depthwise_input_gradient, conv, sources["grad"], weight_of(weight), target
                    )
        add = False
        for lo, hi in boxes(grad.shape[2:], dim, rng.randint(0, grad.shape[2 + dim])):
            bounds = [(ctypes.c_int64 * 3)(*v) for v in (lo, hi)]
            into = weight_of(of_weight)
            args = conv, sources["x"], sources["grad"], *bounds, ctypes.c_bool(add), into
            call(library.hc_depthwise_weight_gradient, *args)
            add = True
        for name, got, expected in zip(PASSES, (out, of_input, of_weight), right, strict=True):
            # the weight gradient is stored twice: the second time with what the second box adds
            assert_near(got, expected, f"{name} of {what}", roundings=2 if got is of_weight else 1)


def test_columns_count_from_the_own_shard(library):
    """Fails when a halo, whose columns are negative, is not read: a shard in the middle of three."""
    generator = torch.Generator().manual_seed(0)
    x = make(generator, (1, 4, 1, 6, 20), torch.float64)
    weight = make(generator, (4, 1, 1, 3, 5), torch.float64)
    grad = make(generator, x.shape, torch.float64)
    window = ([1, 1, 1], [0, 1, 2], [1, 1, 1])
    own = slice(8, 13)  # halos of 2 on either side
    out, of_input, _ = exact(x, weight, None, grad, *window)
    conv = Conv(dtype=C_DTYPE[torch.float64], batch=1, channels=4)
    conv.kernel[:], conv.stride[:], conv.dilation[:], conv.padding[:] = (
        (1, 3, 5),
        *window[0:1],
        *window[2:],
        window[1],
    )
    lies = [torch.contiguous_format] * 3
    partial = torch.zeros_like(weight)
    inside = x[..., own].clone()
    for what, tensor, right in (("x", x, out), ("grad", grad, of_input)):
        source, kept = in_pieces(tensor[..., 6:15], 2, [2, 7], 2, lies)
        got = torch.zeros(1, 4, 1, 6, 5, dtype=torch.float64)
        target = Target(base=got.data_ptr())
        target.strides[:], target.end[:] = got.stride(), (1, 6, 5)
        if what == "x":
            none = ctypes.c_void_p(None), ctypes.c_int64(0)
            call(library.hc_depthwise_forward, conv, source, weight_of(weight), *none, target)
        else:
            call(library.hc_depthwise_input_gradient, conv, source, weight_of(weight), target)
            alone, also_kept = in_pieces(inside, 2, [0, 5], 0, lies)
            bounds = [(ctypes.c_int64 * 3)(*v) for v in ((0, 0, -2), (1, 6, 7))]
            args = conv, alone, source, *bounds, ctypes.c_bool(False), weight_of(partial)
            call(library.hc_depthwise_weight_gradient, *args)
            assert also_kept
        assert kept
        assert_near(got, right[..., own], what)
    only_own = torch.zeros_like(x)
    only_own[..., own] = inside
    assert_near(partial, exact(only_own, weight, None, grad, *window)[2], "pairs of own input columns")
