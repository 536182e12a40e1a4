"""Optional packages, for real: quantized weights and packaged optimizers.

They slow every import of PEFT and transformers, so they have an environment of their own, which `make extras` builds.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-extras" / "bin" / "python"
TESTS = Path(__file__).with_name("with_packages")


@pytest.mark.skipif(not PYTHON.exists(), reason="`make extras` installs the packages in .venv-extras")
def test_the_tests_with_optional_packages_pass():
    command = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout.splitlines()[-1] or "AVX512" in done.stdout, done.stdout
