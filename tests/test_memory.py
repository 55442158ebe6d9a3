"""What sharding is for: the memory of a training step, split against unsplit, measured in one run.

Counted is every large block of memory that is allocated from the start of a step's forward to the end of its backward
(tests/allocations.c, loaded with LD_PRELOAD: what ATen and the C core allocate inside an operation counts too), without
the parameters' gradients, which both have alike. Bytes, not times, so the same on every machine.
"""

import copy
import ctypes
import gc
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
from harness import mesh_of, run_ranks

LIMIT = 0.52  # of the unsplit peak, on 2 ranks: half, and 4 % for halos


def allocations():
    """The counter that is loaded into this process."""
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


def peak_bytes(step):
    """The most bytes that were alive at once in `step`, above those from before."""
    counter = allocations()
    counter.allocations_peak.restype = ctypes.c_long
    gc.collect()
    counter.allocations_mark()
    step()
    return counter.allocations_peak()


def unet():
    """The classic one: four levels, two convolutions each, batch norm, max pool, transposed convolution."""

    def block(inputs, outputs):
        layers = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv2d(channels, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
        return nn.Sequential(*layers)

    class UNet(nn.Module):
        def __init__(self, widths=(16, 32, 64, 128)):
            super().__init__()
            self.down = nn.ModuleList(block(a, b) for a, b in zip((3, *widths), widths))
            self.rise = nn.ModuleList(
                nn.ConvTranspose2d(a, b, 2, 2) for a, b in zip(widths[:0:-1], widths[-2::-1])
            )
            self.up = nn.ModuleList(block(2 * a, a) for a in widths[-2::-1])
            self.head = nn.Conv2d(widths[0], 2, 1)

        def forward(self, x):
            kept = []
            for level in self.down:
                x = level(x if not kept else nn.functional.max_pool2d(x, 2))
                kept.append(x)
            for rise, level, skip in zip(self.rise, self.up, kept[-2::-1]):
                x = level(torch.cat([skip, rise(x)], 1))
            return self.head(x)

    return UNet()


def build(name):
    if name == "unet":
        return unet(), (2, 3, 256, 512)
    import timm

    return timm.create_model(name), (2, 3, 384, 768)


def measure(name, channels_last):
    import haloconv

    mesh = mesh_of((2,))
    torch.manual_seed(0)
    plain, shape = build(name)
    form = torch.channels_last if channels_last else torch.contiguous_format
    plain = plain.to(memory_format=form)
    sharded = haloconv.parallelize(copy.deepcopy(plain), mesh)
    x = torch.randn(shape).contiguous(memory_format=form)
    peaks, losses = [], []
    for model, images in ((plain, x), (sharded, haloconv.distribute(x, mesh))):
        parameters = list(model.parameters())

        def step(model=model, images=images, parameters=parameters):
            loss = model(images).square().mean()
            losses.append(float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
            torch.autograd.grad(loss, parameters)

        step()  # what is allocated once, for all steps
        peaks.append(peak_bytes(step) - sum(parameter.nbytes for parameter in plain.parameters()))
    assert abs(losses[0] - losses[2]) < 1e-4 * abs(losses[0])
    return peaks


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    """The counter, compiled."""
    library = tmp_path_factory.mktemp("allocations") / "allocations.so"
    source = os.path.join(os.path.dirname(__file__), "allocations.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


@pytest.mark.parametrize(
    "name, channels_last",
    [("convnext_atto", True), pytest.param("resnet10t", False, marks=pytest.mark.long), ("unet", False)],
)
def test_half_the_memory_on_two_ranks(counter, name, channels_last):
    """Fails when a step holds a whole activation somewhere, or copies more of one than its edges."""
    command = [sys.executable, __file__, name, str(int(channels_last))]
    environment = {**os.environ, "LD_PRELOAD": counter}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    for unsplit, split in json.loads(done.stdout.splitlines()[-1]):
        print(f"{name}: {unsplit / 2**20:.1f} MiB unsplit, {split / 2**20:.1f} split, {split / unsplit:.3f}")
        assert split <= LIMIT * unsplit, f"{split / unsplit:.3f} of {unsplit / 2**20:.1f} MiB"


if __name__ == "__main__":
    print(json.dumps(run_ranks(2, measure, sys.argv[1], sys.argv[2] == "1", timeout=240)))
