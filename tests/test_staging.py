"""Messages by way of host memory: the host must not send before the copy from the device is through."""

import pytest
import torch
from haloconv import _staging


class LateDevice:
    """Copies run when they are waited for."""

    def __init__(self, monkeypatch):
        self.queued = []
        monkeypatch.setattr(_staging, "_copy", lambda target, source: self.queued.append((target, source)))
        monkeypatch.setattr(_staging, "_wait_for", self.wait)

    def wait(self, device):
        for target, source in self.queued:
            target.copy_(source)
        self.queued.clear()


@pytest.mark.parametrize("sizes", [[1], [100, 7], [_staging.CHUNK_BYTES + 3]])
def test_there_and_back(monkeypatch, sizes):
    """Fails when a twin is used before it is filled, or has no room for the header or for whole chunks."""
    device = LateDevice(monkeypatch)
    buffers = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    twins = _staging.to_host(buffers)
    for twin, buffer in zip(twins, buffers, strict=True):
        assert twin.numel() == _staging.HEADER_BYTES + buffer.numel()
        assert torch.equal(twin[_staging.HEADER_BYTES :], buffer)
    rooms = _staging.rooms(buffers)
    for room, twin in zip(rooms, twins, strict=True):
        assert room.untyped_storage().nbytes() % _staging.CHUNK_BYTES == 0
        room.copy_(twin)
    targets = [torch.zeros_like(buffer) for buffer in buffers]
    _staging.to_device(rooms, targets)
    device.wait(None)
    assert all(torch.equal(a, b) for a, b in zip(targets, buffers, strict=True))


def test_sizes_are_those_of_the_core():
    """Fails when Python and C disagree about headers."""
    import re
    from pathlib import Path

    header = Path(__file__).resolve().parent.parent / "csrc" / "transport.h"
    if not header.exists():
        pytest.skip("csrc/ is not there: an installed copy is being tested")
    numbers = re.search(r"HC_HEADER_BYTES = (\d+), HC_CHUNK_BYTES = 1 << (\d+)", header.read_text())
    assert (int(numbers[1]), 1 << int(numbers[2])) == (_staging.HEADER_BYTES, _staging.CHUNK_BYTES)
