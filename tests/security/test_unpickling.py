"""X6, X7: no running process opens a pickle."""

import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import httpx2
import pytest

from glasshouse.unpickling import UnpicklingRefused

ROOT = Path(__file__).parents[2]


class Canary:
    """A pickle that leaves a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


REFUSE = "from glasshouse.unpickling import refuse_unpickling\n{}refuse_unpickling()\n"
OPEN = "import pickle, sys\npickle.load(open(sys.argv[1], 'rb'))\nprint('opened')\n"


@pytest.mark.parametrize(
    "how",
    [
        OPEN,
        OPEN.replace("pickle.load(", "pickle._Unpickler(").replace("'rb'))", "'rb')).load()"),
        "import _pickle, sys\n_pickle.load(open(sys.argv[1], 'rb'))\nprint('opened')\n",
        "import os, sys\nif pid := os.fork():\n sys.exit(os.waitpid(pid, 0)[1] and 1)\n" + OPEN,
    ],
    ids=["pickle", "in Python", "in C", "in a fork"],
)
@pytest.mark.parametrize("way", ["refuse_unpickling", "seal_pickle"])
def test_a_process_that_refuses_opens_no_pickle(tmp_path: Path, how: str, way: str):
    path, canary = tmp_path / "x.pkl", tmp_path / "canary"
    path.write_bytes(pickle.dumps(Canary(canary)))
    done = run(REFUSE.format("").replace("refuse_unpickling", way) + how, str(path))
    assert "UnpicklingRefused" in done.stderr
    assert done.returncode
    assert not canary.exists()
    assert "opened" in run(how, str(path)).stdout, "it does sing where nobody refuses"
    assert canary.exists()


@pytest.mark.parametrize("way", ["refuse_unpickling", "seal_pickle"])
def test_torch_reads_and_trains_in_a_process_that_refuses(tmp_path: Path, way: str):
    """What the engine needs of torch, numpy and safetensors opens no pickle."""
    code = REFUSE.format("from engine.process.fork_server import warm_up\nwarm_up()\n") + (
        "import sys, copy, torch, numpy, safetensors.torch\n"
        "warm_up()\n"
        "network = torch.nn.Linear(3, 2)\n"
        "copy.deepcopy(network)\n"
        "safetensors.torch.save_file(network.state_dict(), sys.argv[1])\n"
        "network.load_state_dict(safetensors.torch.load_file(sys.argv[1]))\n"
        "print('trained')\n"
    )
    done = run(code.replace("refuse_unpickling", way), str(tmp_path / "x.safetensors"))
    assert done.stdout.strip() == "trained", done.stderr


@pytest.mark.parametrize("way", ["refuse_unpickling", "seal_pickle"])
def test_torch_load_is_refused_even_weights_only_false(tmp_path: Path, way: str):
    import torch  # takes seconds, which the processes without this test do not need

    path, canary = tmp_path / "x.pt", tmp_path / "canary"
    torch.save(Canary(canary), path)
    code = "import sys, torch\n" + REFUSE.format("") + "torch.load(sys.argv[1], weights_only=False)"
    code = code.replace("refuse_unpickling", way)
    assert "UnpicklingRefused" in run(code, str(path)).stderr
    assert not canary.exists()


@pytest.mark.parametrize(
    "name",
    [
        "api/__main__.py",
        "worker/__main__.py",
        "engine/process/fork_server.py",
        "engine/process/planner.py",
    ],
)
def test_every_process_refuses_before_it_listens(name: str):
    lines = (ROOT / name).read_text().splitlines()
    calls = ("refuse_unpickling()", "seal_pickle()")
    (refuses,) = [n for n, line in enumerate(lines) if line.strip() in calls]
    serves = ("server.run(", "return run(", ".serve()", "for line in sys.stdin")
    (begins,) = [n for n, line in enumerate(lines) if any(word in line for word in serves)]
    assert refuses < begins


def torch_file() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps({"weight": 1}))
    return made.getvalue()


UNSAFE = {
    "a pickle": pickle.dumps([1, 2, 3]),
    "a long pickle": pickle.dumps(list(range(100_000))),
    "a pickle of protocol 2": pickle.dumps({"a": 1}, protocol=2),
    "a file of torch.save": torch_file(),
    "an old file of torch.save": pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + bytes(100),
}


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("form", ["csv", "npz", "npy", "idx.zip", "mnist.json.gz"])
def test_a_pickle_by_another_name_is_not_taken(ada: httpx2.Client, name: str, form: str):
    answer = ada.post(f"/api/v1/datasets?format={form}", content=UNSAFE[name])
    assert (answer.status_code, answer.json()["code"]) == (422, "unsafe_format")
    assert "safetensors" in answer.json()["hint"]


@pytest.mark.parametrize("form", ["pickle", "pkl", "pt", "PTH", ".pt", "joblib", "ckpt", "torch"])
def test_a_format_of_pickles_is_refused_by_name(ada: httpx2.Client, form: str):
    answer = ada.post(f"/api/v1/datasets?format={form}", content=b"x")
    assert (answer.status_code, answer.json()["code"]) == (422, "unsafe_format")


@pytest.mark.parametrize(
    "content", [b"a,b\n1,2\n", b"\x80abc", b"", b"PK\x03\x04" + struct.pack("<26x") + b"x/y.pkl"]
)
def test_other_files_are_not_mistaken_for_pickles(ada: httpx2.Client, content: bytes):
    answer = ada.post("/api/v1/datasets?format=csv", content=content)
    assert answer.status_code == 201 or answer.json()["code"] != "unsafe_format"


def test_the_refusal_is_an_error_with_a_name():
    assert issubclass(UnpicklingRefused, RuntimeError)
