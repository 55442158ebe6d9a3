"""pytest's hooks: markers, import path, and the end of the worker processes."""

import math
import os
import sys
from collections import Counter

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)  # so that worker processes can import the test modules by name

import harness  # noqa: E402
import pytest  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "core: what every supported torch must pass (no timm, no torchvision)")
    config.addinivalue_line("markers", "slow: takes more than about 20 seconds")
    config.addinivalue_line("markers", "long: only with HALOCONV_LONG=1: what a shorter test has the core of")
    config.addinivalue_line(
        "markers", "many: cases of one kind, of which HALOCONV_QUICK=1 takes every fourth"
    )
    config.addinivalue_line(
        "markers",
        "own: integers and loops of haloconv's own, which another torch under the same binary cannot change",
    )
    if os.environ.get("HALOCONV_FAKE_CUDA"):  # the workers take the package from where this one has
        from haloconv import _C

        if not _C.fake_device():
            raise pytest.UsageError(f"HALOCONV_FAKE_CUDA is set and {_C.__file__} does not honour it")


RULES = [
    "adaptive",
    "losses",
    "norms",
    "padding",
    "pointwise",
    "pooling",
    "randomness",
    "rearranging",
    "reductions",
    "resizing",
    "unfolding",
]


def pytest_collection_modifyitems(config, items):
    """The rules' grids run on 2 and 4 ranks, and what is marked long is left out. HALOCONV_LONG=1: on 1 and 3 ranks
    too, and all of it. HALOCONV_QUICK=1: on 2 ranks alone, and of what is marked many every fourth: for the second run
    of the same code, under another torch or the sanitizers."""
    if os.environ.get("HALOCONV_LONG") == "1":
        return
    quick = os.environ.get("HALOCONV_QUICK") == "1"
    worlds = (2,) if quick else (2, 4)
    numbers = Counter()  # of the cases so far, by test

    def is_left_out(item):
        given = item.callspec.params if getattr(item, "callspec", None) else {}
        world = math.prod(given["mesh_shape"]) if "mesh_shape" in given else given.get("world")
        numbers[item.path, item.originalname] += 1
        return (
            item.get_closest_marker("long")
            or (item.path.stem.removeprefix("test_") in RULES and world is not None and world not in worlds)
            or (quick and item.get_closest_marker("many") and numbers[item.path, item.originalname] % 4 != 1)
        )

    left_out = {item for item in items if is_left_out(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config):
    try:
        import haloconv
        import torch
    except ImportError as error:
        return f"haloconv: cannot be imported: {error}"
    where = os.path.relpath(os.path.dirname(haloconv.__file__))
    return f"haloconv {haloconv.__version__} from {where}, torch {torch.__version__}"


def pytest_unconfigure(config):
    harness.shutdown()
