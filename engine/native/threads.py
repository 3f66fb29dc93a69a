"""Lends the native kernels the threads that torch computes with.

Those are awake while it computes; a second pool would take turns with them on the same cores.
"""

import ctypes
from pathlib import Path

import torch


def lend_threads(library: ctypes.CDLL) -> bool:
    """Let a library run on torch's threads, where they are those of an OpenMP runtime.

    A name asked of torch's own library is found in the runtime that it was linked with, whatever
    that is called and whichever others are loaded.
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
