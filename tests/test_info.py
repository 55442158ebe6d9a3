"""``python -m haloconv info``, and the symbols that are looked up by name in libraries that torch loads."""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import haloconv
import pytest
import torch
from haloconv import _info
from haloconv.__main__ import main

pytestmark = pytest.mark.core

CSRC = Path(__file__).resolve().parent.parent / "csrc"


def test_info_as_json(capsys):
    """Fails when a part of the report is missing, or is not what torch itself says."""
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["haloconv"]["version"] == haloconv.__version__
    assert report["torch"]["version"] == torch.__version__
    for name in ("CUDA runtime", "NCCL", "cuDNN", "CUDA kernels"):
        assert report[name]["loaded"] or report[name]["why"], name
    if torch.version.cuda is not None:
        assert report["CUDA runtime"]["version"].partition(".")[0] == torch.version.cuda.partition(".")[0]
        assert report["NCCL"]["version"] == ".".join(map(str, torch.cuda.nccl.version()))
        number = torch.backends.cudnn.version()
        assert report["cuDNN"]["version"] == f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    transport = report["transport"]
    assert transport["CPU tensors"]["chosen"] == "c10d"
    if torch.version.cuda is None:
        assert transport["CUDA tensors"]["why not nccl"] == "this torch is built without CUDA"


def test_info_for_a_person():
    """Fails when the command does not run as a command, or leaves a switch of the environment out."""
    command = [sys.executable, "-m", "haloconv", "info"]
    environment = os.environ | {"HALOCONV_CONV_PATH": "general", "HALOCONV_CUDA_LIBRARY": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"torch\n    version: {torch.__version__}\n" in done.stdout
    assert "    HALOCONV_CONV_PATH: general\n" in done.stdout
    assert "CUDA kernels\n    loaded: no\n    why: switched off by HALOCONV_CUDA_LIBRARY=0\n" in done.stdout


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"HALOCONV_TRANSPORT": "c10d"}, {"chosen": "c10d", "why not nccl": "HALOCONV_TRANSPORT is 'c10d'"}),
        ({"HALOCONV_TRANSPORT": "auto", "HALOCONV_TIMEOUT": "20"}, {"chosen": "nccl", "timeout in s": 20.0}),
        ({"HALOCONV_TRANSPORT": "nccl"}, {"chosen": "nccl"}),
    ],
    ids=["c10d", "auto", "nccl"],
)
def test_the_transport_and_why(variables, expected):
    """Fails when the report says another transport than tensors on a device would take, or leaves out why."""
    done = subprocess.run(
        [sys.executable, "-m", "haloconv", "info", "--json"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = json.loads(done.stdout)["transport"]["CUDA tensors"]
    if torch.version.cuda is None and expected["chosen"] == "nccl":
        expected = {"chosen": "c10d", "why not nccl": "this torch is built without CUDA"}
    assert found | expected == found
    assert ("an error where a rank cannot" in found.get("where", "")) == (
        found["chosen"] == "nccl" and variables["HALOCONV_TRANSPORT"] == "nccl"
    )
    if found["chosen"] == "nccl":
        assert found["version"] == ".".join(map(str, torch.cuda.nccl.version()))


@pytest.mark.parametrize("arguments", [[], ["inform"]])
def test_a_wrong_command_lists_those_there_are(arguments, capsys):
    """Fails when someone who mistypes is not told what there is."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert "COMMAND" in text
    assert not arguments or "info" in text.partition("choose from")[2]


def test_a_section_that_fails_does_not_stop_the_report(monkeypatch, capsys):
    """Fails when what is broken hides what is not."""

    def broken():
        raise OSError("no such driver")

    monkeypatch.setattr(
        _info, "_sections", {"first": broken, "second": lambda: {"fine": True, "list": [1, 2]}}
    )
    assert main(["info"]) == 0
    wanted = "first\n    error: OSError: no such driver\nsecond\n    fine: yes\n    list: 1, 2\n"
    assert capsys.readouterr().out == wanted


def names_looked_up():
    """Every function of libtorch_cuda whose name is a literal in csrc/. (tests/test_nccl_abi.py has those of NCCL.)"""
    pattern = r'"(aoti_torch_cuda_\w+|aoti_torch_get_current_cuda_stream)"'
    return sorted({name for path in CSRC.glob("*.c") for name in re.findall(pattern, path.read_text())})


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is a CPU build: it has no libtorch_cuda")
@pytest.mark.skipif(not CSRC.exists(), reason="an installed copy is being tested")
def test_every_name_is_found_in_the_real_library():
    """Fails when the C core asks libtorch_cuda for a function that it does not have."""
    names = names_looked_up()
    assert "aoti_torch_get_current_cuda_stream" in names
    assert "aoti_torch_cuda_convolution" in names
    library = ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    for name in names:
        assert hasattr(library, name), name
