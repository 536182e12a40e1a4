"""Runs chosen tests with other versions of Python, torch and transformers: `make test-versions`.

    python tests/versions/matrix.py                  every environment; writes the table of docs/reference/versions.md
    python tests/versions/matrix.py python-3.12 ...  these only; the other rows stay
    python tests/versions/matrix.py --page           writes the page again from the stored results

Each environment is a folder of `.venv-versions`. The tests compute on the CPU, so the libraries of CUDA, several GB,
are left out; where torch is a build for CUDA, stand-ins take their place (tests/xla/cuda_stubs.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results.json"
PAGE = ROOT / "docs" / "reference" / "versions.md"
FOLDER = ROOT / ".venv-versions"
MINUTES = 30
"""The longest time that the installation, or the tests, of one environment may take."""
WITHOUT_TRANSFORMERS = (
    "tests/args/test_base.py", "tests/args/test_torch_arguments.py", "tests/core/test_order.py",
    "tests/core/test_schedules.py", "tests/pt/test_resume.py", "tests/pt/test_weights.py",
    "tests/pt/test_schedulers.py", "tests/pt/test_seeding.py", "tests/pt/test_saving.py",
)  # fmt: skip
WITH_TRANSFORMERS = (
    *WITHOUT_TRANSFORMERS, "tests/side_by_side/test_numbers.py", "tests/speed/test_layouts.py",
    "tests/pt/test_seq2seq.py", "tests/pt/test_transformers_checkpoints.py",
)  # fmt: skip


PAGE_TEXT = """# Supported versions

This page shows which versions of Python, torch and transformers work, and what was run with each.

| | oldest that passed | newest that passed |
|---|---|---|
{range_rows}

transformers is optional. `make test-versions` makes each environment and runs a chosen set of tests in it, on the CPU:
training, exact resume, saving and schedules; with transformers also the comparison with its Trainer, layouts,
generation and checkpoints in its format. The last results:

| environment | Python | torch | transformers | result | on |
|---|---|---|---|---|---|
{results}

With transformers 4.57 the comparisons with the numbers of its own Trainer are left out. loopwright computes the same
numbers as the Trainer of 5.22; that of 4.57 rounds what it logs, divides the loss of language models by another number
of targets, and has no `GreedyLR`. `no-extra` has only loopwright's five required packages and pytest. The whole suite
(`make test`) runs with Python 3.11, torch 2.13.0 and transformers 5.22.2.
"""


@dataclass(frozen=True)
class Environment:
    name: str
    python: str = "3.11"
    torch: str = "2.13.0"
    """A version, or "newest"."""
    transformers: str = ""
    """A version, "newest", or empty: not installed."""
    left_out: tuple[str, ...] = ()
    """Words in the names of tests that are not run: those that compare with the Trainer of a newer transformers."""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def tests(self) -> tuple[str, ...]:
        return WITH_TRANSFORMERS if self.transformers else WITHOUT_TRANSFORMERS

    @property
    def packages(self) -> list[str]:
        """What is installed beside torch: loopwright, without an extra or with transformers, and pytest."""
        asked = [] if not self.transformers else ["transformers" + pin(self.transformers), "accelerate", "peft"]
        return [str(ROOT), "pytest", "pytest-xdist", "hypothesis", *asked]


OF_NEWER_TRAINER = ("transformers_own", "run_of_transformers_goes_on_here", "greedy_does_what_transformers_does")
ENVIRONMENTS = (
    Environment("no-extra"),
    Environment("python-3.11", transformers="newest"),
    Environment("python-3.12", python="3.12", transformers="newest"),
    Environment("python-3.13", python="3.13", transformers="newest"),
    Environment("python-3.14", python="3.14", transformers="newest"),
    Environment("torch-2.9", torch="2.9.1", transformers="newest"),
    Environment("torch-newest", torch="newest", transformers="newest"),
    Environment("transformers-4.57", transformers="4.57.6", left_out=OF_NEWER_TRAINER),
)


def pin(version: str) -> str:
    return "" if version == "newest" else f"=={version}"


def interpreter(version: str) -> str | None:
    """A Python of this version on this machine, or None."""
    found = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for each in filter(None, found):
        asked = subprocess.run([each, "--version"], capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout.startswith(f"Python {version}."):
            return each
    return None


def command(words: list[str], log: Path, **environ: str) -> int:
    """Run a command, write what it prints to the log; returns its exit code, 124 if it took too long."""
    with log.open("ab") as file:
        file.write(f"\n$ {' '.join(words)}\n".encode())
        file.flush()
        try:
            done = subprocess.run(
                words, cwd=ROOT, stdout=file, stderr=file, env={**os.environ, **environ}, timeout=60 * MINUTES
            )
        except subprocess.TimeoutExpired:
            return 124
    return done.returncode


def install(environment: Environment, python: str, log: Path) -> str:
    """Make the environment, unless it is there; returns what failed, or nothing."""
    ready, contents = environment.folder / "ready.json", json.dumps(asdict(environment))
    if ready.exists() and ready.read_text() == contents:
        return ""
    pip = [str(environment.interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = {
        "the environment": [python, "-m", "venv", "--clear", str(environment.folder)],
        "torch": [*pip, "--no-deps", "torch" + pin(environment.torch)],
        "stand-ins for CUDA": [str(environment.interpreter), __file__, "--without-cuda"],
        "the packages": [*pip, *environment.packages],
    }
    for name, words in steps.items():
        if command(words, log):
            return f"{name} could not be installed"
    ready.write_text(contents)
    return ""


def leave_out_cuda() -> None:
    """Called in an environment with torch alone: remove what it requires of CUDA, and write stand-ins."""
    import sysconfig

    site = Path(sysconfig.get_path("purelib"))
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(re.sub(r"^Requires-Dist: (nvidia|cuda|triton).*\n", "", text, flags=re.MULTILINE))
    if any(path.name.startswith("libtorch_cuda") for path in (site / "torch" / "lib").iterdir()):
        sys.path.insert(0, str(ROOT / "tests" / "xla"))
        import cuda_stubs

        cuda_stubs.main(str(site))


def versions(environment: Environment) -> dict[str, str]:
    """The installed versions of Python, torch and transformers."""
    code = (
        "import json, sys, importlib.metadata as m, importlib.util as u; found = {'python': sys.version.split()[0]}\n"
        "for name in ('torch', 'transformers'):\n"
        "    found[name] = m.version(name) if u.find_spec(name) else ''\n"
        "print(json.dumps(found))"
    )
    return json.loads(subprocess.check_output([str(environment.interpreter), "-c", code], text=True))


def run(environment: Environment) -> dict[str, str]:
    """Make an environment and run its tests; returns a row of the table."""
    row = {"name": environment.name, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    asked = {"python": environment.python, "torch": environment.torch, "transformers": environment.transformers}
    python = interpreter(environment.python)
    if python is None:
        return {**row, **asked, "result": f"not run: there was no Python {environment.python} on the machine"}
    FOLDER.mkdir(exist_ok=True)
    log = FOLDER / f"{environment.name}.log"
    log.unlink(missing_ok=True)
    failed = install(environment, python, log)
    if failed:
        return {**row, **asked, "result": f"not run: {failed}"}
    (stubs,) = environment.folder.glob("lib/python*/site-packages")
    chosen = ["-k", " and ".join(f"not {each}" for each in environment.left_out), *environment.tests]
    code = command(
        [str(environment.interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen], log,
        LD_LIBRARY_PATH=str(stubs / "nvidia_stub"), PYTHONPATH=".", OMP_NUM_THREADS="1",
    )  # fmt: skip
    return {**row, **versions(environment), "result": outcome(code, log.read_text(errors="replace"))}


def outcome(code: int, text: str) -> str:
    """`passed: 120 tests, 3 skipped`, or `failed: 2 tests of 120`."""
    if code == 124:
        return f"failed: not ended after {MINUTES} minutes"
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last_line(text))}
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    if code or not passed:
        return f"failed: {failed} of {passed + failed} tests"
    skipped = f", {counts['skipped']} skipped" if "skipped" in counts else ""
    return f"passed: {passed} tests{skipped}"


def last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def page(rows: list[dict[str, str]]) -> str:
    range_rows = "\n".join(range_row(name, rows) for name in ("python", "torch", "transformers"))
    results = "\n".join(result_row(row) for row in rows)
    return PAGE_TEXT.format(range_rows=range_rows, results=results)


def range_row(name: str, rows: list[dict[str, str]]) -> str:
    """The oldest and the newest version with which all tests passed."""
    passed = {row[name] for row in rows if row["result"].startswith("passed") and row[name]}
    ordered = sorted(passed, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])
    return f"| {name.replace('python', 'Python')} | {ordered[0]} | {ordered[-1]} |" if ordered else f"| {name} | | |"


def result_row(row: dict[str, str]) -> str:
    cells = [row["name"], row["python"], row["torch"], row["transformers"] or "none", row["result"], row["date"]]
    return f"| {' | '.join(cells)} |"


def stored() -> dict[str, dict[str, str]]:
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return {row["name"]: row for row in rows}


def write(rows: dict[str, dict[str, str]]) -> None:
    ordered = [rows[each.name] for each in ENVIRONMENTS if each.name in rows]
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(ordered), encoding="utf-8")


def main(words: list[str]) -> int:
    if words == ["--without-cuda"]:
        leave_out_cuda()
        return 0
    chosen = [] if words == ["--page"] else [each for each in ENVIRONMENTS if not words or each.name in words]
    for environment in chosen:
        row = run(environment)
        print(f"{row['name']}: {row['result']}", flush=True)
        write({**stored(), row["name"]: row})
    write(stored())
    return int(any(row["result"].startswith("failed") for row in stored().values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
