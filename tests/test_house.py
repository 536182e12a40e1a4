"""The rules of the house: who may import whom, what importing costs, names, sizes, types."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import loopwright

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "loopwright"
FILES = sorted(PACKAGE.rglob("*.py"))
FRAMEWORK_FREE = sorted([*(PACKAGE / "core").rglob("*.py"), *(PACKAGE / "args").rglob("*.py")])

# What the rooms without a framework may import beside the standard library. Keras brings numpy and ml_dtypes along.
ALLOWED = {"core": {"numpy"}, "args": {"yaml"}, "keras": {"numpy", "ml_dtypes", "keras", "safetensors"}}
# Rooms that a room may import from; the rest is above it. Callbacks and reporters live on one floor.
BELOW = {
    "args": {"args", "errors", "notices"},
    "core": {"core", "args", "errors", "notices"},
    "launch": {"launch", "core", "args", "errors", "notices"},
    "speed": {"speed", "core", "args", "errors", "notices"},
    "callbacks": {"callbacks", "reporters", "core", "args", "errors", "notices"},
    "reporters": {"reporters", "callbacks", "core", "args", "errors", "notices"},
    "keras": {"keras", "callbacks", "reporters", "core", "args", "errors", "notices"},
    "tf": {"tf", "keras", "callbacks", "reporters", "core", "args", "errors", "notices"},
    # Of tf only what somebody who has TensorFlow hands over; see test_jax_imports_tensorflow_for_what_is_made_of_it.
    "jax": {"jax", "tf", "keras", "callbacks", "reporters", "core", "args", "errors", "notices"},
}
LONGEST = 400
# Files that are one long table or one long list, and lose by being cut.
MAY_BE_LONGER: dict[str, int] = {"pt/trainer.py": 550}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, at the top or inside a function, as an absolute name.

    What is only for type checkers does not count.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ["loopwright", *path.relative_to(PACKAGE).parent.parts]
    for node in _run_time_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            if module == "loopwright":  # `from .. import core` names a room
                yield from (f"loopwright.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            yield ast.literal_eval(node.args[0])


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _run_time_nodes(other)
            continue
        yield child
        yield from _run_time_nodes(child)


def _is_import_call(node: ast.Call) -> bool:
    called = ast.unparse(node.func).split(".")[-1]
    return called in ("import_module", "__import__") and bool(node.args) and isinstance(node.args[0], ast.Constant)


@pytest.mark.parametrize("path", FRAMEWORK_FREE, ids=relative)
def test_core_and_args_import_no_framework(path):
    room = path.relative_to(PACKAGE).parts[0]
    allowed = {*sys.stdlib_module_names, *ALLOWED[room], "loopwright"}
    foreign = {name for name in imports(path) if name.split(".")[0] not in allowed}
    assert not foreign


@pytest.mark.parametrize("path", sorted((PACKAGE / "keras").rglob("*.py")), ids=relative)
def test_keras_imports_neither_tensorflow_nor_jax(path):
    test_core_and_args_import_no_framework(path)


def test_jax_imports_tensorflow_for_what_is_made_of_it():
    found = {name for path in (PACKAGE / "jax").rglob("*.py") for name in imports(path)}
    assert not {name for name in found if name.split(".")[0] == "tensorflow"}
    assert {name for name in found if name.startswith("loopwright.tf")} == {
        "loopwright.tf.pipelines",
        "loopwright.tf.summary_writer",
    }


@pytest.mark.parametrize("room", BELOW)
def test_rooms_import_only_what_is_below_them(room):
    for path in (PACKAGE / room).rglob("*.py"):
        inside = [name.split(".") for name in imports(path) if name.startswith("loopwright")]
        above = {parts[1] for parts in inside if len(parts) > 1} - BELOW[room] - {"__version__"}
        assert not above, f"{relative(path)} imports from {sorted(above)}"


def test_the_walk_sees_imports_inside_functions(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax\n"
        "def f():\n    import torch.nn\n    from ..pt import x\n    __import__('tensorflow')\n"
    )
    (tmp_path / "core").mkdir()
    path = tmp_path / "core" / "a.py"
    path.write_text(source)
    assert set(imports(path)) == {"typing", "torch.nn", "loopwright.pt", "tensorflow"}


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_brings_no_framework():
    code = "import sys, loopwright; print(*sorted(m.split('.')[0] for m in sys.modules))"
    loaded = set(run_python(code).split())
    assert not loaded & {"torch", "transformers", "datasets", "tensorflow", "jax", "accelerate", "numpy", "rich"}


def test_the_core_imports_where_modules_of_unix_are_missing():
    """As on Windows: what only Unix has is imported where it is used."""
    hidden = ("resource", "fcntl", "pwd", "grp", "termios", "posix_ipc")
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n" + "\n".join(
        f"import loopwright.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}"
        for path in FRAMEWORK_FREE
        if path.stem != "__init__"
    )
    run_python(code + "\nfrom loopwright.core.host_memory import host_peak\nassert host_peak() == 0")


def test_import_takes_less_than_100_ms():
    def seconds(code: str) -> float:
        def once() -> float:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            return time.perf_counter() - start

        return min(once() for _ in range(5))

    assert seconds("import loopwright") - seconds("pass") < 0.1


TF_NAMES = sorted(name for name, home in loopwright._HOME.items() if home.startswith(("tf.", "jax.", "keras.")))


@pytest.mark.xdist_group("tensorflow")
@pytest.mark.parametrize("name", TF_NAMES)
def test_public_name_of_tensorflow_is_there(name):
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    if loopwright._HOME[name].startswith("jax."):
        pytest.importorskip("jax", reason="JAX is not installed")
    test_public_name_is_there(name)


@pytest.mark.parametrize("name", sorted({*loopwright._HOME} - {*TF_NAMES}))
def test_public_name_is_there(name):
    home = loopwright._HOME[name]
    assert getattr(loopwright, name) is getattr(import_module(f"loopwright.{home}"), name)
    assert name in dir(loopwright) and name in loopwright.__all__


def test_names_taken_from_transformers_are_its_own():
    transformers = pytest.importorskip("transformers")
    assert transformers
    for name, module in loopwright._FROM_TRANSFORMERS.items():
        assert getattr(loopwright, name) is getattr(import_module(module), name)


def test_names_taken_from_transformers_say_when_it_is_missing():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "try:\n    from loopwright import HfArgumentParser\n"
        "except ImportError as error:\n    print(type(error).__name__, error)"
    )
    assert re.match(r"MissingPackage .*HfArgumentParser.*pip install transformers", run_python(code))


def test_unknown_public_name_suggests_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'Trainer'"):
        _ = loopwright.Trianer


def test_type_checkers_see_the_names_of_the_table():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    table = {(module, name) for name, module in loopwright._HOME.items()}
    assert seen == table | {(module, name) for name, module in loopwright._FROM_TRANSFORMERS.items()}


@pytest.mark.parametrize("folder", ["src", "tests", "examples"])
def test_no_file_is_named_for_nothing(folder):
    nothing = {"utils", "util", "helpers", "helper", "misc", "common"}
    found = [path for path in (ROOT / folder).rglob("*") if path.stem in nothing and "__pycache__" not in path.parts]
    assert not found


def test_nothing_is_unpickled():
    words = re.compile(r"\b(import|from) (c?pickle|dill|cloudpickle|joblib)\b|\bpickle\.|weights_only\s*=\s*False")
    guilty = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(_code_lines(path), start=1)
        if words.search(line)
    ]
    assert not guilty


def _code_lines(path: Path) -> list[str]:
    """The lines of a file, with docstrings and comments blanked: those may speak about what is not done."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return [line.split("#")[0] for line in lines]


@pytest.mark.parametrize("path", FRAMEWORK_FREE, ids=relative)
def test_public_functions_of_core_and_args_are_annotated(path):
    bare = [name for name, function in _public_functions(ast.parse(path.read_text())) if not _annotated(function)]
    assert not bare


def _public_functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _public_functions(child, f"{child.name}.")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_"):
            yield prefix + child.name, child


def _annotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]
    named = [each for each in parameters if each.arg not in ("self", "cls")]
    return function.returns is not None and all(each.annotation is not None for each in named)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_is_not_too_long(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAY_BE_LONGER.get(relative(path), LONGEST)


def test_what_may_be_longer_still_is():
    shorter = [name for name in MAY_BE_LONGER if len((PACKAGE / name).read_text().splitlines()) <= LONGEST]
    assert not shorter


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_python_blocks_compile(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    assert blocks
    for block in blocks:
        compile(block, page, "exec")


def test_the_example_of_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    example = next(block for block in blocks if "class Regression" in block)
    code = example + (
        "print('loss', trainer.evaluate()['eval_loss'])\n"
        "print('same', torch.equal(restored.linear.weight, trainer.model.linear.weight))\n"
    )
    lines = run_python(code).splitlines()
    found = dict(line.split() for line in lines if line.startswith(("loss ", "same ")))
    assert float(found["loss"]) < 1e-3 and found["same"] == "True"


def test_versions_are_pinned():
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in pins
    assert all("==" in pin for pin in pins if pin and not pin.startswith("#"))


@pytest.mark.xdist_group("house")
def test_tests_of_a_group_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """What is costly to build is built once: pytest-xdist 3.8 cannot tell groups to pytest 9.2."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("not among several processes")
    assert request.node.nodeid.endswith("@house")
