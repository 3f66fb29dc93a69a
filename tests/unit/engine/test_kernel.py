"""The native kernel, the plain path and numpy say the same: within 1e-6, relative.

Mean and std may besides differ by 1e-12 of the largest value: there they cancel to nothing.
"""

import math
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native.compiling import (
    ISAS,
    LIBRARY,
    SOURCE,
    NotCompiled,
    compile_into,
    find_compiler,
)
from engine.probes import hooks
from engine.probes.statistics import native_kernel, plain_torch
from engine.probes.statistics.native_kernel import TYPES, Kernel, is_dense, takes
from engine.probes.statistics.summarize import summarize, summarize_all
from tests.conftest import IN_CI, absent
from tests.unit.engine.test_watching import _small, _step, _tensors, by_numpy

ROOT = Path(__file__).parents[3]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -3e-39, 3e38, -6e4, 1.0, 1e-7]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The kernel that the package has, or one made for these tests."""
    if native_kernel.LOADED is not None:
        return native_kernel.LOADED
    if IN_CI or find_compiler() is None:
        absent("the kernel (python -m engine.native)")
    return Kernel(compile_into(tmp_path_factory.mktemp("kernel")))


def test_the_kernel_is_in_force_where_it_must_be():
    if native_kernel.LOADED is None:
        absent("the kernel (python -m engine.native)")
    assert all(takes(torch.zeros(3).to(dtype)) for dtype in TYPES)


def agree(found: list[float], expected: list[float]) -> None:
    size = expected[5] if math.isfinite(expected[5]) else 0.0
    for place, (have, want) in enumerate(zip(found, expected, strict=True)):
        slack = 1e-12 * size if place < 2 else 0.0
        assert have == pytest.approx(want, rel=1e-6, abs=max(slack, 1e-300), nan_ok=True), place


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(TYPES)))
    shape = draw(st.sampled_from([(), (0,), (1,), (7,), (3, 5), (16, 17), (2, 1029), (4100,)]))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if not dtype.is_floating_point:
        return (x * 50).clamp(-100, 100).abs().to(dtype)
    x = x * 10.0 ** draw(st.integers(-30, 30)) + draw(st.sampled_from([0.0, 1e4, -1e-3]))
    x = x.to(dtype)
    flat = x.reshape(-1)
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=5)):
        if len(flat):
            flat[draw(st.integers(0, len(flat) - 1))] = value
    if draw(st.booleans()) and x.dim() == 2:
        x = x.t()
    return x[..., :: draw(st.integers(1, 3))] if x.dim() else x


@given(tensors())
@settings(max_examples=300, deadline=None)
def test_kernel_plain_path_and_numpy_agree(native, x):
    expected = by_numpy(x)
    for isa in range(len(ISAS)):
        agree(native.many([x], isa=isa)[0], expected)
    agree(plain_torch.figures(x), expected)
    agree(plain_torch.figures_on_device(x).tolist(), expected)


@pytest.mark.parametrize("name", _tensors())
def test_awkward_tensors_have_the_plain_paths_figures(native, name):
    x = _tensors()[name]
    before = x.clone()
    for isa in range(len(ISAS)):
        agree(native.many([x], isa=isa)[0], plain_torch.figures(x))
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1.0, 1e150, 1e300, 1e308])
def test_doubles_of_any_size_neither_overflow_nor_vanish(native, size):
    x = torch.tensor([1.0, -0.5, 0.25, 0.0, math.inf, math.nan], dtype=torch.float64) * size
    wanted = np.array([1.0, -0.5, 0.25, 0.0])
    parts = [wanted.mean(), wanted.std(), -0.5, 1.0, np.sqrt((wanted**2).sum()), 1.0]
    for isa in range(len(ISAS)):
        found = native.many([x], isa=isa)[0]
        assert found[:6] == pytest.approx([part * size for part in parts], rel=1e-6, abs=0)
        assert found[6:] == [1 / 6, 1, 1]
    for found in (plain_torch.figures(x), plain_torch.figures_on_device(x).tolist()):
        assert found[:6] == pytest.approx([part * size for part in parts], rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_sixteen_bits_is_read_right(native, dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    agree(native.many([x])[0], by_numpy(x))
    for start in range(0, len(x), 4096):
        agree(native.many([x[start : start + 4096]])[0], by_numpy(x[start : start + 4096]))


def test_a_deviation_that_the_mean_dwarfs_is_seen(native):
    generator = torch.Generator().manual_seed(0)
    x = 1e9 + 1e-3 * torch.randn(100_003, generator=generator, dtype=torch.float64)
    agree(native.many([x])[0], by_numpy(x))
    assert native.many([torch.full((5000,), 0.1)])[0][1] == 0.0


def test_blocks_of_nothing_but_nan_leave_the_others_figures(native):
    x = torch.randn(3 * 2048 + 5, generator=torch.Generator().manual_seed(0))
    x[2048:4096] = math.nan
    agree(native.many([x])[0], by_numpy(x))


def test_a_batch_is_its_tensors_one_by_one(native):
    batch = [x for x in _tensors().values() if takes(x)] * 60
    assert len(batch) > 1000
    assert str(native.many(batch)) == str([native.many([x])[0] for x in batch])
    assert native.many([]) == []


def test_parameters_that_cannot_be_read_together_are_read_one_by_one(tmp_path, monkeypatch):
    def fail(_: object) -> None:
        raise RuntimeError

    records: list[list[dict]] = []
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(hooks, "summarize_all", fail)
        seen: list = []
        torch.manual_seed(0)
        everything = {"layers": ["*"], "kinds": ["param", "param_grad"], "every": 1}
        network, probes = _small([everything], tmp_path, seen.append)
        _step(network, probes, 0)
        records.append([record["rows"] for record in seen])
    assert records[0] == records[1]
    assert len(records[0][0]) == 12


def test_what_the_kernel_cannot_read_takes_the_plain_path():
    whole = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    odd = [whole.to_sparse(), torch.complex(whole, whole), torch.complex(whole, whole).conj().imag]
    assert not any(takes(x) for x in odd)
    for x, found in zip(odd, summarize_all(odd), strict=True):
        assert found == summarize(x)
        assert found[5] == 2.0


def test_memory_in_any_order_is_read_where_it_lies():
    x = torch.zeros(2, 3, 4, 5)
    dense = [
        x,
        x.permute(3, 1, 0, 2),
        x.to(memory_format=torch.channels_last),
        x[:1].transpose(1, 3),
    ]
    assert all(is_dense(item) for item in dense)
    assert not any(is_dense(item) for item in (x[:, 1:], x[..., ::2], x[0, 0, 0].expand(4, 5)))


def test_threads_may_share_it(native):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(50_000, generator=generator) + number for number in range(2)]
    expected = [native.many([x])[0] for x in inputs]
    wrong: list[list[float]] = []

    def work(number: int) -> None:
        for _ in range(200):
            found = native.many([inputs[number]])[0]
            if found != expected[number]:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.long
def test_a_library_of_another_source_is_not_used(tmp_path):
    if find_compiler() is None:
        absent("a C++ compiler")
    library = tmp_path / LIBRARY
    assert native_kernel.load(library) is None
    library.write_bytes(b"not a library")
    assert native_kernel.load(library) is None
    library.unlink()
    command = [find_compiler(), "-shared", "-fPIC", "-DKERNEL_SOURCE=1", SOURCE, "-o", library]
    subprocess.run([*command, "-Wno-psabi"], check=True)
    assert native_kernel.load(library) is None
    (tmp_path / "new").mkdir()  # a path that was opened once is not read again by dlopen
    assert native_kernel.load(compile_into(tmp_path / "new")) is not None


def test_a_compiler_that_fails_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    with pytest.raises(NotCompiled, match="false failed"):
        compile_into(tmp_path)
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    with pytest.raises(NotCompiled, match="on the path"):
        compile_into(tmp_path)
    assert not list(tmp_path.iterdir())


def build(tree: Path, out: Path, target: str = "wheel", **environment: str) -> tuple[Path, str]:
    """Build a wheel; the wheel and what was said."""
    pytest.importorskip("hatchling") if not IN_CI else None
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out],
        cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return next(out.glob("*.whl")), done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout without a built kernel."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy / name)
    skipped = shutil.ignore_patterns("__pycache__", LIBRARY)
    for name in ("glasshouse", "engine", "models", "api", "worker", "migrations", "docs/errors"):
        shutil.copytree(ROOT / name, copy / name, ignore=skipped)
    return copy


@pytest.mark.long
def test_a_wheel_holds_the_kernel_and_says_its_platform(tree, tmp_path):
    if find_compiler() is None:
        absent("a C++ compiler")
    wheel, _ = build(tree, tmp_path / "out")
    assert not wheel.name.endswith("-none-any.whl")
    zipfile.ZipFile(wheel).extract(f"engine/native/{LIBRARY}", tmp_path)
    made = Kernel(tmp_path / "engine" / "native" / LIBRARY)
    assert made.many([torch.tensor([3.0, -4.0])])[0][4] == 5.0
    assert not (tree / "engine" / "native" / LIBRARY).exists()


@pytest.mark.long
def test_an_editable_install_has_the_kernel_beside_its_source(tree, tmp_path):
    if find_compiler() is None:
        absent("a C++ compiler")
    build(tree, tmp_path / "out", "wheel:editable")
    library = tree / "engine" / "native" / LIBRARY
    assert Kernel(library).many([torch.tensor([3.0, -4.0])])[0][4] == 5.0
    library.unlink()


@pytest.mark.long
def test_without_a_compiler_the_install_continues_and_the_plain_path_is_used(tree, tmp_path):
    nowhere = {"PATH": str(tmp_path / "nothing"), "CXX": ""}
    build(tree, tmp_path / "editable", "wheel:editable", **nowhere)
    wheel, said = build(tree, tmp_path / "out", **nowhere)
    assert [
        line for line in said.splitlines() if "no native kernels" in line and "on the path" in line
    ]
    assert wheel.name.endswith("py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import torch\n"
        "from engine.probes.statistics import native_kernel, summarize\n"
        "assert native_kernel.LOADED is None\n"
        "assert summarize.summarize(torch.tensor([3.0, -4.0]))[4] == 5.0\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "site", check=True)
