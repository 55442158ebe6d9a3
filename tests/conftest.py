"""pytest's hooks: markers, import path, and the end of the worker processes."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)  # so that worker processes can import the test modules by name

import harness  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "core: what every supported torch must pass (no timm, no torchvision)")
    config.addinivalue_line("markers", "slow: takes more than about 20 seconds")


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
