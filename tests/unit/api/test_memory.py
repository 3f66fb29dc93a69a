"""What an API keeps of the memory that its threads have freed."""

import platform
import subprocess
import sys

import pytest

HEAPS = """
import ctypes, sys, threading
from api.__main__ import share_memory

if sys.argv[1] == "shared":
    share_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(8)

def take():
    libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
libc.fclose.argtypes = [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's own malloc")
@pytest.mark.parametrize("how", ["shared", "as it comes"])
@pytest.mark.long
def test_the_threads_of_an_api_take_their_memory_from_two_places(how, tmp_path):
    """As it comes each of the eight has one: the control."""
    told = tmp_path / "heaps.xml"
    subprocess.run([sys.executable, "-c", HEAPS, how, str(told)], check=True, timeout=120)
    heaps = told.read_text().count("<heap nr=")
    assert (heaps <= 2) == (how == "shared"), heaps
