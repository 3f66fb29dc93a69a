"""Statistics of CUDA tensors where there is no CUDA: the kernel in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from engine.probes.statistics import triton_check
from tests.conftest import absent

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(900)  # half a minute of numpy, or minutes where the machine is busy
@pytest.mark.parametrize(
    "tests", ["gpu and not slow", pytest.param("gpu and slow", marks=pytest.mark.slow)]
)
@pytest.mark.long
def test_the_kernel_is_right_in_the_interpreter(tests: str):
    """In a process of its own, because Triton reads the variable when it is imported."""
    if find_spec("triton") is None:
        absent("Triton, which is there for Linux")
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_triton_kernel.py", "-m", tests]
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


COMPILE = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.probes.statistics import triton_kernel as k

def compile(function, signature, **constants):
    given = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=function, signature=given, constexprs=constants)
    for architecture in (75, 90):  # the oldest and the newest
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        assert "cubin" in made.asm
        ptx = made.asm["ptx"]
        assert ".ftz" not in ptx, "small values would become zeros"
        atomics = set(re.findall(r"(?:atom|red)[.](?:global|shared)[.\\w]*", ptx))
        assert not [name for name in atomics if ".f" in name], atomics

sums = {"sums": "*fp64", "num_tiles": "i32"}
table = {"table": "*i64", "num": "i32", **sums}
tile = {"TILE": k.TILE}
for name, type in (("fp32", k.tl.float32), ("bf16", k.tl.bfloat16), ("u8", k.tl.uint8)):
    one = {"x": "*" + name, "size": "i32", **sums}
    compile(k._sum_up_one, one | {"counts": "*fp64"}, BINS=0, COPIES=32, **tile)
    compile(k._sum_up_one, one | {"counts": "*i32"}, BINS=4096, COPIES=32, **tile)
    compile(k._sum_up_many, table, TYPE=type, **tile)
out = {"figures": "*fp64"}
compile(k._merge_one, {**sums, "size": "i32", **out}, BLOCK=k.MERGED_AT_ONCE)
compile(k._merge_many, table | out, FIGURES=9, BLOCK=k.MERGED_AT_ONCE)
print("compiled")
"""


@pytest.mark.long
def test_the_kernel_compiles_for_devices_that_are_not_here(tmp_path: Path):
    """To machine code: no flushing of small values to zero, no atomics on floating point."""
    if find_spec("triton") is None:
        absent("Triton, which is there for Linux")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "compiled\n", done.stderr[-3000:]


def test_without_triton_the_plain_path_is_used_and_that_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(triton_check, "find_spec", lambda _: None)
    triton_check.kernel_for.cache_clear()
    device = torch.device("meta")
    assert triton_check.kernel_for(device) is None
    assert triton_check.kernel_for(device) is None
    said = capsys.readouterr().err
    assert said == ("glasshouse: statistics on meta take the plain path: Triton is not installed\n")
    triton_check.kernel_for.cache_clear()


def test_the_reason_is_reported_which_is_at_the_end_of_tritons_message():
    """Before it is the source up to the line, which is longer than what is reported."""
    source = ["at 36:4:", *["    x = x + 1"] * 60]
    message = "\n".join([*source, 'ValueError("arange\'s range must be a power of 2")'])
    assert triton_check.shortened(message) == f"at 36:4: … {message.splitlines()[-1]}"
    assert triton_check.shortened("one line\n") == "one line"
    assert triton_check.shortened("") == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_module_says_that_there_is_no_device(capsys):
    assert triton_check.main() == 1
    assert "no CUDA device" in capsys.readouterr().out
