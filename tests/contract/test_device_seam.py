"""The engine speaks to accelerators through ``torch.accelerator`` and ``engine/core/device.py``."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONLY_CUDA = {
    "engine/probes/statistics/triton_check.py",
    "engine/probes/statistics/triton_kernel.py",
}
NAME_THE_SETTING = {"engine/__main__.py", "engine/guards/update_gate.py"}
"""They compare ``devices.type`` of a spec, which is a word of ours."""
BACKENDS = {"cuda", "xpu", "mps", "mtia"}


def backends_named(source: str) -> set[str]:
    """The lines that use a backend's module, or compare with its name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in BACKENDS:
            found.add(f"{node.lineno}: .{node.attr}")
        if isinstance(node, ast.Constant) and node.value in BACKENDS:
            found.add(f"{node.lineno}: {node.value!r}")
    return found


def test_one_module_knows_the_backends():
    found = {
        name: named
        for path in (ROOT / "engine").rglob("*.py")
        if (name := path.relative_to(ROOT).as_posix()) != "engine/core/device.py"
        and (named := backends_named(path.read_text()))
    }
    assert found.keys() == ONLY_CUDA | NAME_THE_SETTING, found
    for name in NAME_THE_SETTING:
        assert {item.split()[1] for item in found[name]} == {"'cuda'"}


def test_the_test_sees_each_way_to_name_one():
    assert backends_named("import torch\ntorch.cuda.synchronize()") == {"2: .cuda"}
    assert backends_named("x.device.type == 'xpu'") == {"1: 'xpu'"}
    assert backends_named('"""About CUDA and cuda."""') == set()
