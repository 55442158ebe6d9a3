"""The bodies of the CUDA kernels, run on the host over the launches that a GPU would get.

cuda/blocks_host.c runs every thread of every launch, in shuffled order. The oracle is numpy on strided views, and
torch's sum for what is added. Buffers end where their last element does, so that the sanitized build (`make sanitize`)
sees a unit that is too wide.
"""

import ctypes
import math
import mmap
import os
import subprocess
import sys

import hostkernels as host
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.core, pytest.mark.own]

CASES = int(os.environ.get("HALOCONV_FUZZ_CASES", "100"))
KINDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # by element size
DTYPES = {
    host.FLOAT64: torch.float64,
    host.FLOAT32: torch.float32,
    host.FLOAT16: torch.float16,
    host.BFLOAT16: torch.bfloat16,
}
cases = settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))


def strided(sizes, order, gaps):
    """Strides of a layout that has the dimensions in `order`, innermost last, each `gap` elements apart too far."""
    strides, stride = [0] * len(sizes), 1
    for dim in reversed(order):
        strides[dim] = stride
        stride = stride * sizes[dim] + gaps[dim]
    return strides


def span_elements(sizes, strides):
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))


class Side:
    """Memory of one side of a box: `offset` elements, then just as many as the box spans."""

    def __init__(self, sizes, strides, offset, element_size, seed):
        self.sizes, self.strides, self.offset, self.element_size = sizes, strides, offset, element_size
        length = (offset + span_elements(sizes, strides)) * element_size
        self.memory = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)

    @property
    def address(self):
        return self.memory.ctypes.data + self.offset * self.element_size

    def view(self, memory):
        elements = memory.view(KINDS[self.element_size])[self.offset :]
        strides = [stride * self.element_size for stride in self.strides]
        return np.lib.stride_tricks.as_strided(elements, self.sizes, strides)


@st.composite
def boxes(draw, element_size, reads=None):
    ndim = draw(st.integers(0, 6))
    sizes = draw(st.lists(st.integers(1, [9, 40, 12, 6, 4, 3, 3][ndim]), min_size=ndim, max_size=ndim))
    if ndim and draw(st.booleans()):
        sizes[-1] *= 16  # long enough for wide units and for several threads to have more than one
    sides = []
    for _ in range(2):
        order = draw(st.permutations(range(ndim)))
        if draw(st.booleans()):
            order = list(range(ndim))
        gap = draw(st.sampled_from([0, 0, 1, 2, 8]))
        gaps = [gap if draw(st.booleans()) else 0 for _ in range(ndim)]
        offset = draw(st.sampled_from([0, 0, 1, 2, 3, 4, 8, 15]))
        sides.append((strided(sizes, order, gaps), offset))
    if ndim and draw(st.integers(0, 4)) == 0:
        sides[1][0][draw(st.integers(0, ndim - 1))] = 0  # an expanded source
    seed = draw(st.integers(0, 2**32))
    target, source = [
        Side(sizes, strides, offset, element_size, seed + i) for i, (strides, offset) in enumerate(sides)
    ]
    if reads is False or (reads is None and draw(st.integers(0, 4)) == 0):
        source = None
    return target, source


@st.composite
def calls(draw, sizes=tuple(KINDS), reads=None):
    element_size = draw(st.sampled_from(sizes))
    count = draw(st.sampled_from([1, 1, 2, 2, 3, 16, 17, 40]))
    return element_size, [draw(boxes(element_size, reads)) for _ in range(count)]


def block_of(target, source):
    address, strides = (None, [0] * len(target.sizes)) if source is None else (source.address, source.strides)
    return host.Block(target.address, address, target.sizes, target.strides, strides)


def run(blocks, call):
    """Runs `call(library, blocks, count)` and checks that it took as few launches as there is room for."""
    library = host.library()
    before = library.hc_host_launch_count()
    error = call(library, host.array_of(blocks), len(blocks))
    assert error == 0, library.hc_cuda_error_text(error)
    assert library.hc_host_launch_count() - before == math.ceil(len(blocks) / host.SPANS)


@pytest.fixture(autouse=True)
def geometry():
    yield
    host.library().hc_host_geometry(1, 1)


@cases
@given(calls(), st.integers(1, 3), st.integers(0, 2**60))
def test_copies(call, multiprocessors, seed):
    """Fails when a byte of a box is not where it belongs, or one outside is touched."""
    element_size, pairs = call
    host.library().hc_host_geometry(multiprocessors, seed)
    expected = []
    for target, source in pairs:
        memory = target.memory.copy()
        target.view(memory)[...] = 0 if source is None else source.view(source.memory)
        expected.append(memory)
    run(
        [block_of(*pair) for pair in pairs],
        lambda lib, b, n: lib.hc_cuda_blocks_copy(b, n, element_size, None),
    )
    for (target, _), memory in zip(pairs, expected):
        np.testing.assert_array_equal(target.memory, memory)


@cases
@given(calls(), st.binary(min_size=16, max_size=16))
def test_fills(call, value):
    """Fails when what has no source does not become the value, or what has one does."""
    element_size, pairs = call
    element = np.frombuffer(value[:element_size], KINDS[element_size])[0]
    expected = []
    for target, source in pairs:
        memory = target.memory.copy()
        target.view(memory)[...] = element if source is None else source.view(source.memory)
        expected.append(memory)
    run(
        [block_of(*pair) for pair in pairs],
        lambda lib, b, n: lib.hc_cuda_blocks_fill(b, n, element_size, value, None),
    )
    for (target, _), memory in zip(pairs, expected):
        np.testing.assert_array_equal(target.memory, memory)


def as_torch(side, memory, dtype):
    return torch.from_numpy(memory).view(dtype).as_strided(side.sizes, side.strides, side.offset)


@cases
@given(st.sampled_from(sorted(DTYPES)), st.data(), st.integers(1, 3), st.integers(0, 2**60))
def test_adds(element, data, multiprocessors, seed):
    """Fails when a sum differs from torch's in a bit: 16-bit numbers are added in float32 and rounded once, to even.

    The bits are random: infinities, NaNs and denormals are among them.
    """
    dtype = DTYPES[element]
    _, pairs = data.draw(calls((dtype.itemsize,), reads=True))
    host.library().hc_host_geometry(multiprocessors, seed)
    expected = []
    for target, source in pairs:
        memory = target.memory.copy()
        place = as_torch(target, memory, dtype)
        place += as_torch(source, source.memory, dtype)
        expected.append(memory)
    run([block_of(*pair) for pair in pairs], lambda lib, b, n: lib.hc_cuda_blocks_add(b, n, element, None))
    for (target, _), memory in zip(pairs, expected):
        got, want = (torch.from_numpy(m).view(dtype) for m in (target.memory, memory))
        assert torch.equal(got.isnan(), want.isnan())
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        assert torch.equal(got.view(bits)[~got.isnan()], want.view(bits)[~want.isnan()])


@pytest.mark.parametrize("element", [host.FLOAT16, host.BFLOAT16], ids=["float16", "bfloat16"])
def test_every_16_bit_number_is_added_as_torch_adds_it(element):
    """Fails when a rounding, a carry, an infinity or a denormal of a 16-bit sum is wrong."""
    dtype = DTYPES[element]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    for shift in (0, 1, 77, 4096, 12345, 32768, 40000):
        source = every.roll(shift).contiguous()
        target, want = every.clone(), every + source
        block = host.Block(target.data_ptr(), source.data_ptr(), [2**16], [1], [1])
        run([block], lambda lib, b, n: lib.hc_cuda_blocks_add(b, n, element, None))
        assert torch.equal(target.isnan(), want.isnan())
        assert torch.equal(target.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


ALIGNED = 1 << 20


@pytest.mark.parametrize(
    "element_size, sizes, target_strides, source_strides, misaligned, width",
    [
        (2, [64, 3 * 128], [3 * 128, 1], [130 * 128, 1], 0, 16),  # channels_last, bfloat16
        (2, [64, 3], [3, 1], [128, 1], 0, 2),  # contiguous: rows of 3 pixels
        (2, [64, 4], [4, 1], [128, 1], 0, 8),
        (4, [64, 4], [4, 1], [128, 1], 0, 16),
        (4, [64, 4], [4, 1], [130, 1], 0, 8),
        (4, [1000], [1], [1], 0, 16),
        (4, [1000], [1], [1], 8, 8),
        (4, [1000], [1], [1], 4, 4),
        (4, [10, 10], [10, 1], [1, 10], 0, 4),  # a transposition goes by elements
        (2, [128, 3], [3, 1], [1, 128], 0, 2),  # a channels_last shard into a contiguous buffer
        (16, [7], [1], [1], 0, 16),
        (16, [7], [1], [1], 8, 8),
        (1, [31], [1], [1], 0, 1),
        (8, [], [], [], 0, 8),
        (4, [5], [2], [1], 2, 2),  # addresses that do not suit the element
    ],
)
def test_units_are_as_wide_as_they_can_be(
    element_size, sizes, target_strides, source_strides, misaligned, width
):
    """Fails when a halo that could travel by 16 bytes does not, or one that can't would be read out of alignment."""
    block = host.Block(ALIGNED, 2 * ALIGNED + misaligned, sizes, target_strides, source_strides)
    (span,) = host.spans_of([block], element_size)
    assert span.width == width
    assert span.units * width == math.prod(sizes) * element_size


def test_bytes_that_no_element_is_aligned_to_are_copied():
    """Fails when a copy of elements at odd addresses is refused or wrong; their sum and their fill are refused."""
    source, target = np.arange(400, dtype=np.uint8), np.zeros(400, dtype=np.uint8)
    block = host.Block(target.ctypes.data + 3, source.ctypes.data + 1, [9, 5], [10, 2], [5, 1])
    run([block], lambda lib, b, n: lib.hc_cuda_blocks_copy(b, n, 4, None))
    want = np.zeros(400, dtype=np.uint8)
    for i in range(9):
        for j in range(5):
            want[3 + 4 * (10 * i + 2 * j) :][:4] = source[1 + 4 * (5 * i + j) :][:4]
    np.testing.assert_array_equal(target, want)
    library, array = host.library(), host.array_of([block])
    assert library.hc_cuda_blocks_add(array, 1, host.FLOAT32, None) == host.MISALIGNED
    array[0].source = None
    assert library.hc_cuda_blocks_fill(array, 1, 4, b"abcd", None) == host.MISALIGNED
    assert library.hc_cuda_blocks_copy(array, 1, 4, None) == 0  # to zero, which has no order of bytes


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**31 - 1), st.one_of(st.integers(1, 2**30), st.integers(1, 1000)))
def test_division(number, divisor):
    """Fails when the multiplication that stands for a division is off by one."""
    divide = host.library().hc_host_divide
    nearby = number // divisor * divisor
    for n in (number, nearby, max(nearby - 1, 0), 2**31 - 1):
        assert divide(n, divisor) == n // divisor


@pytest.mark.parametrize("element_size", [1, 4, 16])
def test_offsets_beyond_31_bits(element_size):
    """Fails when an offset is computed in 32 bits, of elements or of bytes, on either side."""
    stride = 2**31 + 16
    rows = mmap.mmap(-1, (2 * stride + 64) * element_size, flags=mmap.MAP_PRIVATE | 0x4000)  # MAP_NORESERVE
    base = ctypes.addressof(ctypes.c_char.from_buffer(rows))
    packed = np.random.default_rng(0).integers(0, 256, 3 * 32 * element_size, dtype=np.uint8)
    out = host.Block(base, packed.ctypes.data, [3, 32], [stride, 1], [32, 1])
    run([out], lambda lib, b, n: lib.hc_cuda_blocks_copy(b, n, element_size, None))
    for row in range(3):
        begin = row * stride * element_size
        assert (
            rows[begin : begin + 32 * element_size]
            == packed[row * 32 * element_size :][: 32 * element_size].tobytes()
        )
    back = np.zeros_like(packed)
    block = host.Block(back.ctypes.data, base, [3, 32], [32, 1], [stride, 1])
    run([block], lambda lib, b, n: lib.hc_cuda_blocks_copy(b, n, element_size, None))
    np.testing.assert_array_equal(back, packed)


def located(span, number):
    """Where a span has its unit of that number: the arithmetic of hc_span_move, in exact integers."""
    target, source = span.target, span.source
    for dim in range(span.ndim - 1, 0, -1):
        number, index = divmod(number, span.sizes[dim - 1].divisor)
        target += index * span.target_strides[dim]
        source += index * span.source_strides[dim]
    return target + number * span.target_strides[0], source + number * span.source_strides[0]


@pytest.mark.parametrize(
    "element_size, sizes, gap",
    [
        (1, [3 * 2**30 + 5], 0),
        (2, [5, 2**30 + 8], 6),
        (4, [2**20, 3, 2**11], 1),
        (4, [3, 2, 2**31, 2], 1),
        (8, [2**40], 0),
        (16, [2**33, 1], 0),
        (4, [7, 1, 2**15, 2**16 - 1], 1),
        (4, [2**30], 1),
        (4, [2**30 + 1], 1),
    ],
)
def test_what_is_too_large_for_32_bits_is_cut(element_size, sizes, gap):
    """Fails when the pieces of a huge block overlap, leave a gap, or are too large. No memory is touched."""
    target_strides = strided(sizes, range(len(sizes)), [gap] * len(sizes))
    source_strides = strided(sizes, range(len(sizes)), [0] * len(sizes))
    block = host.Block(2**50, 2**51, sizes, target_strides, source_strides)
    spans = host.spans_of([block], element_size)
    whole = math.prod(sizes) * element_size
    assert sum(span.units * span.width for span in spans) == whole
    assert all(0 < span.units <= host.UNITS_MAX for span in spans)
    assert len(spans) <= 2 * math.ceil(whole / spans[0].width / host.UNITS_MAX) * max(1, *sizes[:-2], 1)
    done = 0
    for span in spans:
        for number in (0, span.units // 3, span.units - 1):
            element, byte = divmod(done + number * span.width, element_size)
            place = [2**50 + byte, 2**51 + byte]
            for dim in reversed(range(len(sizes))):
                element, index = divmod(element, sizes[dim])
                place[0] += index * target_strides[dim] * element_size
                place[1] += index * source_strides[dim] * element_size
            assert located(span, number) == tuple(place)
        done += span.units * span.width


BOX = ([4, 5], [5, 1], [5, 1])


@pytest.mark.parametrize(
    "change, element_size",
    [
        (dict(), 3),
        (dict(), 0),
        (dict(), 32),
        (dict(), -4),
        (dict(target=None), 4),
        (dict(ndim=7), 4),
        (dict(ndim=-1), 4),
        (dict(sizes=host.Int64s(4, 0)), 4),
        (dict(sizes=host.Int64s(-4, 5)), 4),
    ],
)
def test_what_is_no_block_is_refused(change, element_size):
    """Fails when a kernel is launched for nonsense: the one bad block among good ones stops them all."""
    memory = np.zeros(64, dtype=np.float32)
    good = host.Block(memory.ctypes.data, memory.ctypes.data + 128, *BOX)
    bad = host.Block(memory.ctypes.data, memory.ctypes.data + 128, *BOX)
    for name, value in change.items():
        setattr(bad, name, value)
    library, before = host.library(), host.library().hc_host_launch_count()
    error = library.hc_cuda_blocks_copy(host.array_of([good, bad]), 2, element_size, None)
    assert error == host.INVALID_VALUE
    assert library.hc_cuda_error_text(error) == b"invalid argument"
    assert library.hc_host_launch_count() == before


def test_calls_that_make_no_sense_are_refused():
    """Fails when a sum without a source or of unknown elements, or a fill without a value, is tried."""
    memory = np.zeros(64, dtype=np.float32)
    library = host.library()
    no_source = host.array_of([host.Block(memory.ctypes.data, None, *BOX)])
    whole = host.array_of([host.Block(memory.ctypes.data, memory.ctypes.data + 128, *BOX)])
    assert library.hc_cuda_blocks_add(no_source, 1, host.FLOAT32, None) == host.INVALID_VALUE
    assert library.hc_cuda_blocks_add(whole, 1, host.OTHER, None) == host.INVALID_VALUE
    assert library.hc_cuda_blocks_add(whole, 1, 5, None) == host.INVALID_VALUE
    assert library.hc_cuda_blocks_fill(whole, 1, 4, None, None) == host.INVALID_VALUE
    assert library.hc_cuda_blocks_copy(None, 1, 4, None) == host.INVALID_VALUE
    assert library.hc_cuda_blocks_copy(whole, -1, 4, None) == host.INVALID_VALUE
    before = library.hc_host_launch_count()
    assert library.hc_cuda_blocks_copy(None, 0, 4, None) == 0
    assert library.hc_host_launch_count() == before


def test_the_host_library_says_that_it_is_one():
    """Fails when a library for tests could be taken for the kernels."""
    about = host.About()
    host.library().hc_cuda_tell(ctypes.byref(about))
    assert (about.abi, about.host, about.runtime_version, about.archs) == (1, 1, 0, b"host")


WIRED = """
import copy, ctypes, sys
import torch, torch.distributed as dist
import haloconv, haloconv._C
from torch.distributed.device_mesh import init_device_mesh
library = ctypes.CDLL(haloconv._C.cuda_library()["path"])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for dtype in (torch.float64, torch.float32, torch.bfloat16):
    model = torch.nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False, dtype=dtype)
    split = haloconv.parallelize(copy.deepcopy(model), mesh)
    x = torch.randn(2, 4, 6, 9, dtype=dtype, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    before = library.hc_host_launch_count()
    out, want = haloconv.gather(split(haloconv.distribute(x, mesh))), model(y)
    out.backward(want.detach())
    want.backward(want.detach())
    assert library.hc_host_launch_count() - before >= 2, "the kernels were not used"
    # a gradient of size 1 whose halo is added after rounding: two steps of bfloat16
    close = dict(rtol=2**-7, atol=2**-7) if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, want, **close)
    torch.testing.assert_close(x.grad, y.grad, **close)
group = dist.group.WORLD.group_name
for dtype, fill in (
    (torch.float64, 1.5),
    (torch.float32, -torch.inf),
    (torch.bfloat16, 1 / 3),
    (torch.float16, 1 / 3),
    (torch.float16, 1e-7),
    (torch.int64, 0),
    (torch.int64, 3),  # by ATen, beside the kernel that copies
    (torch.complex128, 0),
):
    x = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(dtype)
    before = library.hc_host_launch_count()
    got = torch.ops.haloconv.halo_exchange(x, 3, 5, [4, 1, 1, 2, 1, 0], False, False, fill, 0, 1, group)
    assert library.hc_host_launch_count() - before == 1, "columns outside are a kernel of their own"
    assert torch.equal(got, torch.nn.functional.pad(x, (1, 2), value=fill)), (dtype, fill, got)
dist.destroy_process_group()
print("passed")
"""


@pytest.mark.skipif(
    bool(os.environ.get("HALOCONV_SANITIZE")), reason="`make test-kernels` does this, and more"
)
def test_halos_are_moved_by_the_kernels():
    """Fails when haloconv has kernels for a device and does not use them, or calls them wrongly."""
    environment = os.environ | {"HALOCONV_CUDA_LIBRARY": str(host.path())}
    command = [sys.executable, "-c", WIRED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.strip()) == (0, "passed"), done.stderr


OVERRUN = """
import ctypes, sys
import hostkernels as host
library = host.load(sys.argv[1])
memory = ctypes.CDLL(None).malloc
memory.restype = ctypes.c_void_p
source, target, extra = memory(400), memory(400), int(sys.argv[2])
block = host.Block(target, source, [5, 20 + extra], [20, 1], [20, 1])
ctypes.memset(source, 1, 400)
print(library.hc_cuda_blocks_copy(host.array_of([block]), 1, 4, None))
"""


@pytest.mark.skipif(bool(os.environ.get("HALOCONV_SANITIZE")), reason="the sanitizers are loaded already")
def test_the_sanitized_build_sees_an_overrun(tmp_path):
    """Fails when the build that is to catch a kernel that writes too far would not."""
    library = host.build(tmp_path, *host.SANITIZERS)
    names = ("libasan.so", "libubsan.so")
    found = [
        subprocess.run(["gcc", f"-print-file-name={n}"], stdout=subprocess.PIPE, text=True) for n in names
    ]
    preload = " ".join(os.path.realpath(done.stdout.strip()) for done in found)
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0:symbolize=0",
        "PYTHONPATH": os.path.dirname(host.__file__),
    }
    for extra in (0, 1):
        command = [sys.executable, "-c", OVERRUN, str(library), str(extra)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        if extra == 0:
            assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
        else:
            assert done.returncode != 0
            assert "heap-buffer-overflow" in done.stderr
