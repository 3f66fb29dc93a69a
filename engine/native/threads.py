"""Run the native kernels on torch's threads.

torch's threads stay awake while it computes. A second pool would compete for the same cores.
"""

import ctypes
from pathlib import Path

import torch


def lend_threads(library: ctypes.CDLL) -> bool:
    """Let a library run on torch's threads, if torch uses an OpenMP runtime.

    The symbols are looked up in torch's own library. That finds the runtime that torch is linked
    with, whatever its name and whichever others are loaded.
    """
    if "backend: OpenMP" not in torch.__config__.parallel_info():
        return False
    folder = Path(torch.__file__).with_name("lib")
    try:
        runtime = ctypes.CDLL(str(next(folder.glob("libtorch_cpu.*"))))
        run, number = runtime.GOMP_parallel, runtime.omp_get_thread_num
    except (StopIteration, OSError, AttributeError):
        return False
    addresses = [ctypes.cast(item, ctypes.c_void_p) for item in (run, number)]
    library.glasshouse_kernel_threads(*addresses)
    return True
