"""Stand-ins for CUDA's libraries, so that a CUDA build of torch imports on a machine without CUDA.

The only Linux build of torch 2.9.0 in the public index is the CUDA one, and all it needs to run on a CPU is that the
libraries it is linked with can be found. Each stand-in has the name, the symbols and the symbol versions torch asks
for, and every function answers "no device" (100), so torch.cuda.is_available() is False. For tests only.

    python cuda_stubs.py SITE_PACKAGES      writes SITE_PACKAGES/nvidia_stub, which goes into LD_LIBRARY_PATH
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

IS_CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
IS_CUDA_SYMBOL = re.compile(r"_{0,2}(cu|nv|nccl)")
RETURNS_TEXT = re.compile(r"Get(Error|Status)(String|Name)$")
UNVERSIONED, NVSHMEM = "libnccl.so.2", "libnvshmem_host.so.3"
"""Who defines symbols without a version, and those whose version is not the name of their library."""


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wanted(libraries: list[Path]) -> dict[str, dict[str, str]]:
    """For each CUDA library: the symbols torch takes from it, with their versions."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for library in libraries:
        for needed in re.findall(r"\(NEEDED\).*\[(.+?)\]", output_of("readelf", "-dW", str(library))):
            if IS_CUDA_LIBRARY.match(needed):
                found[needed].update({})
        symbols = output_of("nm", "-D", "--undefined-only", "--with-symbol-versions", str(library))
        for line in symbols.splitlines():
            name, _, version = line.split()[-1].partition("@")
            version = version.lstrip("@")
            if IS_CUDA_SYMBOL.match(name):
                owner = {"": UNVERSIONED, "NVSHMEM": NVSHMEM}.get(version, version)
                found[owner][name] = version
    return found


def source(symbols: dict[str, str]) -> str:
    lines = []
    for name in sorted(symbols):
        if RETURNS_TEXT.search(name):
            lines.append(f'const char *{name}(void) {{ return "there is no CUDA here"; }}')
        else:
            lines.append(f"long {name}(void) {{ return 100; }}")
    return "\n".join(lines) + "\n"


def build(target: Path, name: str, symbols: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        code, versions = Path(scratch, "stub.c"), Path(scratch, "versions")
        code.write_text(source(symbols))
        command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(target / name), str(code)]
        named = sorted({version for version in symbols.values() if version})
        if named:  # the loader insists that a version is defined by the library it was linked with
            versions.write_text("".join(f"{version} {{ global: *; }};\n" for version in named))
            command.append(f"-Wl,--version-script={versions}")
        subprocess.run(command, check=True)


def main(site_packages: str) -> Path:
    torch_libraries = sorted(Path(site_packages, "torch", "lib").glob("lib*.so"))
    target = Path(site_packages, "nvidia_stub")
    target.mkdir(exist_ok=True)
    for name, symbols in wanted(torch_libraries).items():
        build(target, name, symbols)
    return target


if __name__ == "__main__":
    print(main(sys.argv[1]))
