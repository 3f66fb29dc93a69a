"""Build the native kernels with any C++ compiler that is installed.

Used by ``hatch_build.py`` when the package is installed, and by ``python -m engine.native``. It
imports only the standard library, because it also runs where nothing is installed yet. ``python -m
engine.native.compiling`` reports whether there is a library that loads; ``doctor`` runs it.
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
    "-fno-math-errno", "-fno-trapping-math",  # these keep NaN, infinities and signed zeros
    "-Wno-psabi",
)  # fmt: skip
PATIENCE_S = 120
ISAS = ("baseline", "avx2", "avx512")
"""Instruction sets, in the order of their numbers in the source."""


class NotCompiled(Exception):
    """There is no usable kernel; the message says why."""


def source_mark() -> int:
    """Return a number that identifies the sources; a library built from them returns the same."""
    text = b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS))
    return int(hashlib.sha256(text).hexdigest()[:15], 16)


def find_compiler() -> str | None:
    """Return the C++ compiler: ``$CXX``, or the first one on the path."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def compile_into(directory: Path) -> Path:
    """Compile the kernels into a directory. The library is moved there only when complete.

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
    """Load a built library.

    Raises:
        NotCompiled: it is missing, cannot be loaded, or was built from other sources.
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
    """Return the instruction set that a kernel uses on this machine."""
    return ISAS[library.glasshouse_kernel_isa()]


def main() -> int:
    """Print whether the kernels can be loaded."""
    try:
        library = open_library(SOURCE.with_name(LIBRARY))
    except NotCompiled as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{SOURCE.with_name(LIBRARY)} ({best_isa(library)})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
