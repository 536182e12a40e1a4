"""The test device: built from `device.cpp` at first use and registered with torch under the name `neuron`.

A process that has registered it has an accelerator from then on, so tests that use it run in processes of their own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "neuron"
SECONDS = 300
"""How long the compiler may take; it takes about half a minute."""


def missing() -> str | None:
    """Why the device cannot be built here, or None."""
    return None if compiler() else "the test device needs a C++ compiler (g++ or $CXX), and there is none"


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def build(cache: Path) -> Path:
    """The shared library of the device, compiled unless the cache holds it for this source and this torch."""
    import torch
    from torch.utils.cpp_extension import include_paths

    made_of = [SOURCE.read_bytes(), torch.__version__.encode(), sys.version.encode()]
    key = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    target = cache / f"neuron_device_{key}.so"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    libraries = Path(torch.__file__).parent / "lib"
    partial = target.with_suffix(f".{os.getpid()}.part")  # several processes may build at once
    command = [
        str(compiler()), "-std=c++20", "-O0", "-w", "-fPIC", "-shared", str(SOURCE), "-o", str(partial),
        f"-DTORCH_EXTENSION_NAME={target.stem}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]]),
        f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-Wl,-rpath,{libraries}",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=SECONDS)
    partial.replace(target)
    return target


def register(library: Path) -> None:
    """Give torch the device; it is `torch.accelerator.current_accelerator()` from here on."""
    import torch

    spec = spec_from_file_location(library.stem, library)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    torch._register_device_module(NAME, DeviceModule("torch.neuron"))


class DeviceModule(types.ModuleType):
    """`torch.neuron`: as little as torch asks for. No memory figures, no pinned memory, no streams."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        """Its random numbers are the CPU's, which are seeded with everybody's."""

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Any:
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: Any, device: Any = None) -> None:
        import torch

        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[Any]:
        import torch

        return [torch.bfloat16, torch.float16]
