"""Compiles the kernel of the statistics when the package is built or installed.

It is optional: without a C++ compiler the package is pure Python, and slower at watching.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface):
    """Puts the library into a wheel, or beside its source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it, or say in one line why not."""
        compiling = load_compiling(Path(self.root))
        try:
            if version == "editable":
                compiling.compile_into(compiling.SOURCE.parent)
                return
            self._made = tempfile.TemporaryDirectory(prefix="glasshouse-")
            library = compiling.compile_into(Path(self._made.name))
        except (compiling.NotCompiled, OSError) as error:
            sys.stderr.write(f"glasshouse: no kernel for statistics, the plain path: {error}\n")
            return
        build_data["force_include"][str(library)] = f"engine/probes/figures/{compiling.LIBRARY}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was only for the wheel."""
        if hasattr(self, "_made"):
            self._made.cleanup()


def load_compiling(root: Path) -> ModuleType:
    """``engine.probes.figures.compiling``, which needs nothing installed."""
    path = root / "engine" / "probes" / "figures" / "compiling.py"
    spec = importlib.util.spec_from_file_location("glasshouse_compiling", path)
    assert spec is not None  # noqa: S101 - the path ends in .py
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
