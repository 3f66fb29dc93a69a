"""Register the simulated accelerator with torch: ``import tests.accelerator.simulated``.

It is the device ``simulated`` with two indices. Operations are queued, and run when the host waits
for them. A process that registered it keeps it.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch._meta_registrations  # the plans of operators that have theirs in Python
from torch.utils import cpp_extension

from engine.native.compiling import NotCompiled, find_compiler

NAME = "simulated"
SOURCES = Path(__file__).with_name("csrc")
BUILT = Path(__file__).parents[2] / ".cache" / "simulated"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-DAT_PER_OPERATOR_HEADERS")


def library() -> Path:
    """Build the library if there is none of these sources and this torch.

    Raises:
        NotCompiled: there is no compiler, or it failed.
    """
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))
    mark = hashlib.sha256(text + torch.__version__.encode()).hexdigest()[:16]
    made = BUILT / f"{mark}.so"
    if made.exists():
        return made
    compiler = find_compiler()
    if compiler is None:
        raise NotCompiled("no C++ compiler is on the path")
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as name:
        objects = _objects(compiler, Path(name))
        linked = Path(name) / made.name
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        used = [*libraries, "-ltorch", "-ltorch_cpu", "-lc10"]
        _run([compiler, "-shared", *map(str, objects), "-o", str(linked), *used])
        linked.replace(made)
    return made


def _objects(compiler: str, directory: Path) -> list[Path]:
    included = [f"-I{path}" for path in cpp_extension.include_paths()]

    def compiled(source: Path) -> Path:
        made = directory / f"{source.stem}.o"
        _run([compiler, *FLAGS, *included, "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return [*threads.map(compiled, sorted(SOURCES.glob("*.cpp")))]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotCompiled(done.stderr[-4000:])


class Module(types.ModuleType):
    """``torch.simulated``: what torch and the engine look up in the module of a backend."""

    def __init__(self, native: ctypes.CDLL) -> None:
        super().__init__(f"torch.{NAME}")
        self.native = native
        self._is_initialized = False

    def _lazy_init(self) -> None:
        self._is_initialized = True

    def is_initialized(self) -> bool:
        return self._is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation

    # --- streams

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:  # noqa: N802
        return torch.Stream(torch.device(NAME, _index(device)), priority=priority)

    def Event(self, enable_timing: bool = False) -> torch.Event:  # noqa: N802
        return torch.Event(NAME, enable_timing=enable_timing)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def stream(self, stream: torch.Stream) -> Any:
        return stream

    # --- random generators

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        state = (ctypes.c_uint64 * 2)()
        self.native.simulated_get_state(_index(device), state)
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        values = (ctypes.c_uint64 * 2).from_buffer_copy(state.numpy().tobytes())
        self.native.simulated_set_state(_index(device), values)

    def initial_seed(self) -> int:
        return int.from_bytes(bytes(self.get_rng_state()[:8].tolist()), sys.byteorder)

    def manual_seed(self, seed: int, device: Any = NAME) -> None:
        self.native.simulated_set_state(_index(device), (ctypes.c_uint64 * 2)(seed % 2**64, 0))

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self.manual_seed(seed, index)

    # --- memory

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        index = _index(device)
        total = self.native.simulated_capacity(index)
        return total - self.native.simulated_allocated(index), total

    def memory_allocated(self, device: Any = None) -> int:
        return self.native.simulated_allocated(_index(device))

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        index = _index(device)
        self.native.simulated_set_memory(index, self.native.simulated_capacity(index), fraction)

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return self.native.simulated_fraction(_index(device))

    # --- for tests only

    def draw_as_host(self, is_wanted: bool = True) -> None:
        """Draw the numbers of the CPU's generator, so that results equal those of the CPU."""
        self.native.simulated_draw_as_host(is_wanted)

    def set_capacity(self, num_bytes: int, device: Any = None) -> None:
        index = _index(device)
        self.native.simulated_set_memory(index, num_bytes, self.native.simulated_fraction(index))

    def num_queued(self, device: Any = None) -> int:
        """How many operations wait on a device."""
        return self.native.simulated_num_queued(_index(device))

    def num_run(self) -> int:
        """How many operations have run on all devices."""
        return self.native.simulated_num_run()

    def num_waits(self) -> int:
        """How often the host has waited for operations that had not run."""
        return self.native.simulated_num_waits()


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return torch.accelerator.current_device_index() if index is None else index


def _load() -> ctypes.CDLL:
    path = str(library())
    torch.ops.load_library(path)
    native = ctypes.CDLL(path)
    size, number = ctypes.c_size_t, ctypes.c_int
    native.simulated_set_memory.argtypes = [number, size, ctypes.c_double]
    native.simulated_set_memory.restype = None
    native.simulated_capacity.restype = native.simulated_allocated.restype = size
    native.simulated_num_queued.restype = size
    native.simulated_num_run.restype = native.simulated_num_waits.restype = ctypes.c_uint64
    native.simulated_draw_as_host.argtypes = [ctypes.c_bool]
    native.simulated_fraction.restype = ctypes.c_double
    return native


torch.utils.rename_privateuse1_backend(NAME)
module = Module(_load())
torch._register_device_module(NAME, module)
sys.modules[f"torch.{NAME}"] = module
torch.utils.generate_methods_for_privateuse1_backend()
