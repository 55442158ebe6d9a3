"""The suite through the NCCL transport, on the stand-in for NCCL and CUDA (tests/fakes/).

haloconv is built once with the hooks that let CPU tensors pass for a device's, and parts of the suite run on it in a
process of their own: every halo then travels over an NCCL communicator of the stand-in. HALOCONV_TRANSPORT is nccl, so
nothing falls back to another transport unseen. `make fakes` runs the long form.
"""

import os
import shutil

import fakebuild
import pytest

pytestmark = [
    pytest.mark.skipif(
        not (fakebuild.ROOT / "csrc").exists() or shutil.which("gcc") is None, reason="needs csrc/ and gcc"
    ),
    pytest.mark.skipif(
        "HALOCONV_FAKE_CUDA" in os.environ or os.environ.get("HALOCONV_SANITIZE") == "1",
        reason="is being run on the stand-in, or sanitized, already",
    ),
    pytest.mark.slow,
]

TRANSPORT = "tests/test_transport_nccl.py"

# What runs, and how many tests at least have to pass.
SHORT = [
    TRANSPORT,
    "tests/test_cases.py::test_case_03_subgroup",
    "tests/test_cases.py::test_case_03_data_parallel_times_spatial",
    "tests/test_cases.py::test_case_04_halo_is_not_half_the_kernel",
    "tests/test_cases.py::test_case_11_sizes_that_do_not_divide",
    "tests/test_cases.py::test_case_12_kernel_wider_than_the_neighbours_shard",
    "tests/test_convolution_paths.py::test_meshes_with_several_dims",
    "tests/test_norms.py::test_like_unsplit[batch-2]",
    "tests/test_norms.py::test_like_unsplit[group-2]",
]
LONG = {
    "the transport": ([TRANSPORT], 34),
    "convolutions by name": (["tests/test_cases.py"], 80),
    "random convolutions": (["tests/test_convolution_fuzz.py", "-k", "not census"], 600),
    "both paths": (["tests/test_convolution_paths.py", "-k", "libtorch_call_may_fail"], 4),
    "norms": (["tests/test_norms.py"], 10),
    "pooling": (["tests/test_pooling.py"], 5),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return fakebuild.build(tmp_path_factory.mktemp("fakes"))


def passes(environment, arguments, least, **variables):
    status, passed, failed, text = fakebuild.run_pytest(
        environment, *arguments, HALOCONV_FUZZ_CASES="40", HALOCONV_QUICK="1", timeout=900, **variables
    )
    assert status == 0 and failed == 0 and passed >= least, text[-6000:]


@pytest.mark.timeout(900)
def test_the_transport_and_what_goes_over_it(environment):
    """Fails when something that works over gloo does not over NCCL."""
    passes(environment, SHORT, 80, HALOCONV_FAKE_SEED="0", HALOCONV_LONG="0")


def test_by_way_of_host_memory(environment):
    """Fails when tensors on a device cannot be exchanged over gloo."""
    passes(environment, [TRANSPORT], 8, HALOCONV_TRANSPORT="c10d")


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("what", LONG)
def test_suite(environment, what):
    """Fails as the short one does, in rarer cases."""
    arguments, least = LONG[what]
    passes(environment, arguments, least, HALOCONV_FAKE_SEED="0")


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_eager_device(environment):
    """Fails when the transport relies on a device that is late."""
    passes(environment, [TRANSPORT], 34, HALOCONV_FAKE_SEED="1")


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_sanitized(tmp_path):
    """Fails when the transport, or the stand-in, reads or writes where it must not."""
    environment = fakebuild.build(tmp_path, sanitize=True)
    arguments = [TRANSPORT, "-k", "test_exchanges or every_call or buffers_live"]
    passes(environment, arguments, 8, HALOCONV_TIMEOUT_FACTOR="3")
