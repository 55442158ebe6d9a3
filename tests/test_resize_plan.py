"""The taps of every resampling, one dimension at a time, against ATen itself.

A resampling is linear, so what ATen reads is seen by running it: on ramps for the nearest modes, whose results are
the indices, and on identity matrices for the others, whose results are the weights. A failure means that a sharded
resampling would read other pixels than the unsharded one, or weigh them differently.
"""

import itertools
import os
import random

import numpy as np
import pytest
import torch
from haloconv import _C
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.core, pytest.mark.own]

aten = torch.ops.aten
# Whether torch's kernels on this machine fuse a * b + c; see resize.h.
FUSED = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
EXAMPLES = int(os.environ.get("HALOCONV_FUZZ_CASES", "550"))
SETTINGS = settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
DTYPES = [torch.float32, torch.float64]
NEAREST = ["nearest", "nearest-exact"]
WEIGHTED = ["linear", "cubic", "linear-aa", "cubic-aa"]
# ATen's arithmetic is followed step by step. What is left: the order in which taps on one border pixel are added,
# and, in another build of torch, other fused steps. The far taps of a cubic end in a difference of numbers near 3.
CLOSE = {torch.float32: {"rtol": 1e-6, "atol": 1e-6}, torch.float64: {"rtol": 1e-12, "atol": 4e-15}}


def taps_of(mode, size, out, align_corners=False, scale=None, single=True, channels_last=False, fused=FUSED):
    """(index, weight), each [out, taps]."""
    taps, index, weight = _C.resize(mode, size, out, align_corners, scale, single, channels_last, fused)
    return np.frombuffer(index, np.int64).reshape(out, taps), np.frombuffer(weight).reshape(out, taps)


def dense(index, weight, size):
    """The taps as a matrix [out, size]; taps on one pixel add up."""
    matrix = np.zeros((len(index), size))
    np.add.at(matrix, (np.arange(len(index))[:, None], index), weight)
    return matrix


def run(mode, x, out, align_corners, scale, layout):
    """Resizes x, [channels, size], to [channels, out] with ATen, along a dimension of a tensor of that layout."""
    other = {"2d-large": 140, "2d-channels_last": 140}.get(layout, 2)  # 140: more than 128 pixels altogether
    if layout == "1d":
        ops = {
            "linear": aten.upsample_linear1d,
            "nearest": aten.upsample_nearest1d,
            "nearest-exact": aten._upsample_nearest_exact1d,
        }
        corners = [] if mode in NEAREST else [align_corners]
        return ops[mode](x[None], [out], *corners, scale)[0]
    corners = [] if mode in NEAREST else [align_corners]
    if layout.startswith("3d"):
        ops = {
            "linear": aten.upsample_trilinear3d,
            "nearest": aten.upsample_nearest3d,
            "nearest-exact": aten._upsample_nearest_exact3d,
        }
        volume = x[None, :, :, None, None].expand(-1, -1, -1, 1, 2).contiguous()
        if layout == "3d-channels_last":
            volume = volume.contiguous(memory_format=torch.channels_last_3d)
        return ops[mode](volume, [out, 1, 2], *corners, scale, None, None)[0, :, :, 0, 1]
    ops = {
        "linear": aten.upsample_bilinear2d,
        "cubic": aten.upsample_bicubic2d,
        "linear-aa": aten._upsample_bilinear2d_aa,
        "cubic-aa": aten._upsample_bicubic2d_aa,
        "nearest": aten.upsample_nearest2d,
        "nearest-exact": aten._upsample_nearest_exact2d,
    }
    if layout == "2d-width":
        image = x[None, :, None, :].expand(-1, -1, other, -1).contiguous()
        return ops[mode](image, [other, out], *corners, None, scale)[0, :, 1]
    image = x[None, :, :, None].expand(-1, -1, -1, other).contiguous()
    if layout == "2d-channels_last":
        image = image.contiguous(memory_format=torch.channels_last)
    return ops[mode](image, [out, other], *corners, scale, None)[0, :, :, 1]


def check_nearest(mode, size, out, scale, dtype, layout):
    """The channels_last kernel is taken where resize.h says so; 4 channels, as fewer never are."""
    ramp = torch.arange(size, dtype=dtype).expand(4, size)
    got = run(mode, ramp, out, False, scale, layout)[3].numpy().astype(np.int64)
    small = layout == "2d" or (layout == "2d-width" and out + 2 <= 128)
    special = small or layout.endswith("channels_last")
    index, weight = taps_of(mode, size, out, False, scale, dtype == torch.float32, special)
    where = f"{mode}, {size} to {out}, scale {scale}, {dtype}, {layout}"
    assert index.shape == (out, 1) and (weight == 1).all(), where
    assert index[:, 0].tolist() == got.tolist(), where


def check_weights(mode, size, out, align_corners, scale, dtype, layout):
    got = (
        run(mode, torch.eye(size, dtype=dtype), out, align_corners, scale, layout)
        .numpy()
        .T.astype(np.float64)
    )
    index, weight = taps_of(mode, size, out, align_corners, scale, dtype == torch.float32)
    where = f"{mode}, {size} to {out}, align_corners {align_corners}, scale {scale}, {dtype}, {layout}"
    np.testing.assert_allclose(dense(index, weight, size), got, **CLOSE[dtype], err_msg=where)


@pytest.mark.parametrize("mode", NEAREST)
def test_nearest_on_a_grid(mode):
    for size, out in itertools.product(range(1, 29), range(1, 71)):
        for layout in ("1d", "2d"):
            for dtype in DTYPES:
                check_nearest(mode, size, out, None, dtype, layout)


@pytest.mark.parametrize(
    "layout", ["1d", "2d-width", "2d-large", "2d-channels_last", "3d", "3d-channels_last"]
)
@pytest.mark.parametrize("mode", NEAREST)
def test_nearest_in_every_layout(mode, layout):
    """2 to 41 and 2 to 47 are where the fused kernel picks another pixel, in float; 25 to 65 and 50 to 62, among
    others, where the two kernels of a double tensor differ; 5 to 5 and 5 to 10, where one ignores the scale."""
    sizes = [(2, 41), (2, 47), (5, 5), (5, 10), (25, 65), (50, 62), (70, 49), (61, 7), (300, 131), (131, 300)]
    for (size, out), dtype in itertools.product(sizes, DTYPES):
        for scale in (None, out / size, 2.0, 0.3, 3.0, -1.0):
            check_nearest(mode, size, out, scale, dtype, layout)


@SETTINGS
@given(
    mode=st.sampled_from(NEAREST),
    size=st.integers(1, 70),
    out=st.integers(1, 70),
    scale=st.none() | st.floats(0.02, 70),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["1d", "2d", "3d", "3d-channels_last"]),
)
def test_nearest_fuzz(mode, size, out, scale, dtype, layout):
    check_nearest(mode, size, out, scale, dtype, layout)


@pytest.mark.parametrize("mode", NEAREST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nearest_of_half_types_is_that_of_float(mode, dtype):
    for size, out in itertools.product((1, 2, 5, 13, 64, 70), (1, 5, 10, 41, 47, 70)):
        for layout in ("1d", "2d"):
            ramp = torch.arange(size, dtype=dtype).expand(4, size)
            got = run(mode, ramp, out, False, None, layout)[0].tolist()
            index, _ = taps_of(mode, size, out, channels_last=layout == "2d")
            assert index[:, 0].tolist() == got


def test_the_kernels_of_nearest_differ():
    """The reason for `channels_last`: the same tensor in another layout gives another image."""
    args = ("nearest-exact", torch.arange(25, dtype=torch.float64).expand(4, 25))
    found = 0
    for out in range(1, 71):
        one, other = (run(*args, out, False, 2.7, layout) for layout in ("3d", "3d-channels_last"))
        found += not torch.equal(one, other)
    assert found


LAYOUTS = {
    "linear": ["1d", "2d", "2d-width", "3d", "3d-channels_last"],
    "cubic": ["2d", "2d-width"],
    "linear-aa": ["2d", "2d-width"],
    "cubic-aa": ["2d", "2d-width"],
}


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", WEIGHTED)
def test_weights_on_a_grid(mode, align_corners):
    draw = random.Random(mode)
    for size, out in itertools.product(range(1, 71, 3), range(1, 71, 2)):
        dtype, layout = draw.choice(DTYPES), draw.choice(LAYOUTS[mode])
        check_weights(mode, size, out, align_corners, None, dtype, layout)


@SETTINGS
@given(
    mode=st.sampled_from(WEIGHTED),
    size=st.integers(1, 70),
    out=st.integers(1, 70),
    align_corners=st.booleans(),
    scale=st.none() | st.floats(0.02, 70),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_weights_fuzz(mode, size, out, align_corners, scale, dtype, data):
    if mode.endswith("aa") and scale is not None:
        scale = max(
            scale, out / size
        )  # a smaller one leaves the input, and ATen reads there what isn't its own
    check_weights(mode, size, out, align_corners, scale, dtype, data.draw(st.sampled_from(LAYOUTS[mode])))


@pytest.mark.parametrize("layout", ["2d-large", "2d-channels_last"])
@pytest.mark.parametrize("mode", WEIGHTED)
def test_weights_of_large_images(mode, layout):
    for size, out in ((7, 33), (33, 7), (20, 20), (64, 48)):
        for align_corners, dtype in itertools.product((False, True), DTYPES):
            check_weights(mode, size, out, align_corners, None, dtype, layout)


@pytest.mark.parametrize("mode", WEIGHTED)
def test_a_size_that_stays(mode):
    """Whether a scale counts then, which resize.h says mode by mode."""
    for dtype, scale in itertools.product(DTYPES, (None, 1.5, 2.0)):
        check_weights(mode, 9, 9, False, scale, dtype, "2d")
        index, weight = taps_of(mode, 9, 9, False, scale, dtype == torch.float32)
        is_copy = np.array_equal(dense(index, weight, 9), np.eye(9))
        assert is_copy == (scale is None or mode != "cubic")


@pytest.mark.parametrize("dtype", DTYPES)
def test_adaptive_bins(dtype):
    for size, out in itertools.product(range(1, 71, 6), range(1, 71)):
        x = torch.eye(size, dtype=dtype)
        got = aten._adaptive_avg_pool2d(x[None, :, :, None], [out, 1])[0, :, :, 0].numpy().T
        index, weight = taps_of("adaptive", size, out, single=dtype == torch.float32)
        np.testing.assert_allclose(dense(index, weight, size), got, **CLOSE[dtype])
        assert (weight > 0).all(axis=1).any(), f"no row of {size} to {out} needs {weight.shape[1]} taps"
        assert ((dense(index, weight, size) > 0) == (got > 0)).all()


@SETTINGS
@given(
    mode=st.sampled_from([*NEAREST, *WEIGHTED, "adaptive"]),
    size=st.integers(1, 70),
    out=st.integers(1, 70),
    align_corners=st.booleans(),
    scale=st.none() | st.floats(0.01, 100),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    data=st.data(),
)
def test_rows_and_what_they_read(mode, size, out, align_corners, scale, flags, data):
    """Also with scales at which ATen's antialiased modes read beyond the input: here no index ever leaves it."""
    align_corners = align_corners and mode in WEIGHTED
    scale = None if mode == "adaptive" else scale
    index, weight = taps_of(mode, size, out, align_corners, scale, *flags)
    assert index.min() >= 0 and index.max() < size
    assert (np.diff(index, axis=1) >= 0).all()
    total = weight.sum(axis=1)
    empty = (weight == 0).all(axis=1)
    assert not empty.any() or (mode.endswith("aa") and scale is not None)
    np.testing.assert_allclose(total[~empty], 1, rtol=1e-5)

    begin = data.draw(st.integers(0, out))
    end = data.draw(st.integers(begin, out))
    reads = _C.resize_reads(mode, size, out, align_corners, scale, *flags, begin, end)
    if begin == end:
        assert reads == (0, 0)
        return
    rows = index[begin:end]
    assert reads == (rows.min(), rows.max() + 1)
    if not empty[begin:end].any():
        weighted = rows[weight[begin:end] != 0]
        assert reads == (weighted.min(), weighted.max() + 1)


GOOD = {
    "mode": "linear",
    "in_size": 5,
    "out_size": 7,
    "align_corners": False,
    "scale": None,
    "single_precision": True,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "bicubic"}, "mode is 'bicubic', expected 'nearest', "),
        ({"in_size": 0}, "in_size is 0, expected 1 to 1073741824"),
        ({"in_size": 2**30 + 1}, "in_size is 1073741825, expected 1 to 1073741824"),
        ({"out_size": -3}, "out_size is -3, expected 1 to 1073741824"),
        (
            {"mode": "nearest", "align_corners": True},
            "align_corners is true, expected false in mode 'nearest'",
        ),
        ({"mode": "adaptive", "scale": 2.0}, "scale is 2, expected none in mode 'adaptive'"),
        ({"scale": 1e-12}, "scale is 1e-12, expected 2^-30 to 2^30"),
        ({"scale": float("inf")}, "scale is inf, expected 2^-30 to 2^30"),
        ({"scale": float("nan")}, "scale is nan, expected 2^-30 to 2^30"),
    ],
)
def test_bad_arguments(change, message):
    arguments = (GOOD | change).values()
    with pytest.raises(ValueError) as caught:
        _C.resize(*arguments)
    assert message in str(caught.value)
    with pytest.raises(ValueError) as caught:
        _C.resize_reads(*arguments, False, True, 0, 1)
    assert message in str(caught.value)


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 8)])
def test_bad_outputs(begin, end):
    with pytest.raises(
        ValueError, match=rf"begin and end are {begin} and {end}, expected 0 <= begin <= end <= 7"
    ):
        _C.resize_reads(*GOOD.values(), False, True, begin, end)


def test_what_fits_no_memory():
    with pytest.raises(MemoryError):
        _C.resize("cubic-aa", 2**30, 2**30 - 1, False, 2.0**-29, True)
