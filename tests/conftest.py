"""pytest's hooks: markers, import path, and the end of the worker processes."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)  # so that worker processes can import the test modules by name

import harness  # noqa: E402
import pytest  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "core: what every supported torch must pass (no timm, no torchvision)")
    config.addinivalue_line("markers", "slow: takes more than about 20 seconds")
    config.addinivalue_line("markers", "long: only with HALOCONV_LONG=1: what a shorter test has the core of")
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
    """The rules' grids run on 2 and 4 ranks, and what is marked long is left out; on 1 and 3 too, and all of it, with
    HALOCONV_LONG=1; on 2 alone with HALOCONV_QUICK=1, which is for a second torch under the same binary."""
    if os.environ.get("HALOCONV_LONG") == "1":
        return
    worlds = (2,) if os.environ.get("HALOCONV_QUICK") == "1" else (2, 4)

    def is_left_out(item):
        is_rule = item.path.stem.removeprefix("test_") in RULES
        world = item.callspec.params.get("world") if getattr(item, "callspec", None) else None
        return item.get_closest_marker("long") or (is_rule and world is not None and world not in worlds)

    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
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
