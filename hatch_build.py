"""Build hook: compiles the native statistics kernel and builds the dashboard.

Both are optional. Without a C++ compiler, watching is slower; without Node, the package has no
dashboard. One line reports it, and the installation continues.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class MadeHook(BuildHookInterface):
    """Adds both to a wheel, or writes them next to their sources for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build both, or report in one line why not."""
        self._add_kernel(version == "editable", build_data)
        self._add_page(version == "editable", build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the files that were built only for the wheel."""
        if hasattr(self, "_made"):
            self._made.cleanup()

    def _add_kernel(self, editable: bool, build_data: dict[str, Any]) -> None:
        compiling = load(Path(self.root) / "engine" / "native" / "compiling.py")
        try:
            if editable:
                compiling.compile_into(compiling.SOURCE.parent)
                return
            self._made = tempfile.TemporaryDirectory(prefix="glasshouse-")
            library = compiling.compile_into(Path(self._made.name))
        except (compiling.NotCompiled, OSError) as error:
            sys.stderr.write(f"glasshouse: no native kernels, torch does their work: {error}\n")
            return
        build_data["force_include"][str(library)] = f"engine/native/{compiling.LIBRARY}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def _add_page(self, editable: bool, build_data: dict[str, Any]) -> None:
        dashboard = Path(self.root) / "dashboard"
        if not dashboard.is_dir():
            sys.stderr.write("glasshouse: no page: its sources are not here\n")
            return
        building = load(dashboard / "build.py")
        try:
            building.build()
        except (building.NotBuilt, OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"glasshouse: no page: {error}\n")
            return
        for path in () if editable else building.files():
            name = path.relative_to(dashboard / building.DIST).as_posix()
            build_data["force_include"][str(path)] = f"api/page_files/{name}"


def load(path: Path) -> ModuleType:
    """Load a module of the project that needs no installed package."""
    spec = importlib.util.spec_from_file_location(f"glasshouse_{path.stem}", path)
    assert spec is not None  # noqa: S101 - the path ends in .py
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module
