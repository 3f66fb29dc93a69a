"""Builds the native kernels with whatever C++ compiler there is.

Used by ``hatch_build.py`` when the package is installed, and by ``python -m engine.native``.
Imports nothing but the standard library: it also runs where nothing is installed yet. ``python -m
engine.native.compiling`` says whether there is a library that loads, which ``doctor`` asks.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernel.cpp")
SOURCES = (SOURCE, SOURCE.with_name("pooling.cpp"))
HEADERS = tuple(SOURCE.with_name(name) for name in ("each_isa.h", "threads.h"))
LIBRARY = "_kernel.so"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-fno-trapping-math",  # NaN, infinities and signed zeros stay what they are
    "-Wno-psabi",
)  # fmt: skip
PATIENCE_S = 120
ISAS = ("baseline", "avx2", "avx512")
"""Instruction sets, as the source numbers them."""


class NotCompiled(Exception):
    """There is no kernel, and why."""


def source_mark() -> int:
    """A number that names the sources, which a library built from them also says."""
    text = b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS))
    return int(hashlib.sha256(text).hexdigest()[:15], 16)


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first that is on the path."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def compile_into(directory: Path) -> Path:
    """Compile the kernels into a directory; the library appears there whole or not at all.

    Raises:
        NotCompiled: there is no compiler, or it failed.
    """
    if sys.platform == "win32":
        raise NotCompiled("it is not built on Windows")
    compiler = find_compiler()
    if compiler is None:
        raise NotCompiled(f"none of {', '.join(COMPILERS)} is on the path")
    with tempfile.TemporaryDirectory(dir=directory, prefix=".kernel-") as name:
        made = Path(name) / LIBRARY
        mark = f"-DKERNEL_SOURCE={source_mark()}ULL"
        command = [compiler, *FLAGS, mark, *map(str, SOURCES), "-o", made]
        try:
            done = subprocess.run(  # noqa: S603 - a compiler, our own source
                command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotCompiled(f"{compiler} did not run: {error}") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            said = next((line for line in lines if "error" in line), lines[-1])
            raise NotCompiled(f"{compiler} failed: {said}")
        return made.replace(directory / LIBRARY)


def open_library(path: Path) -> ctypes.CDLL:
    """Load what was built.

    Raises:
        NotCompiled: it is missing, cannot be loaded, or was built from another source.
    """
    if not path.exists():
        raise NotCompiled(f"there is no {path}")
    try:
        library = ctypes.CDLL(str(path))
        library.glasshouse_kernel_source.restype = ctypes.c_uint64
        mark = library.glasshouse_kernel_source()
    except (OSError, AttributeError) as error:
        raise NotCompiled(f"{path} cannot be loaded: {error}") from error
    if mark != source_mark():
        raise NotCompiled(f"{path} was built from other sources")
    return library


def best_isa(library: ctypes.CDLL) -> str:
    """The instruction set that a kernel uses on this machine."""
    return ISAS[library.glasshouse_kernel_isa()]


def main() -> int:
    """Say whether the kernels are there."""
    try:
        library = open_library(SOURCE.with_name(LIBRARY))
    except NotCompiled as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{SOURCE.with_name(LIBRARY)} ({best_isa(library)})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
