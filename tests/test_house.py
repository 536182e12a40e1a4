"""The rules of the house: who may import whom, what importing costs, names, sizes, types, and reasons."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import loopwright

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "loopwright"
FILES = sorted(PACKAGE.rglob("*.py"))
FRAMEWORK_FREE = sorted([*(PACKAGE / "core").rglob("*.py"), *(PACKAGE / "args").rglob("*.py")])

# What the packages without a framework may import beside the standard library. Keras brings numpy and ml_dtypes along.
ALLOWED = {"core": {"numpy"}, "args": {"yaml"}, "keras": {"numpy", "ml_dtypes", "keras", "safetensors"}}

FLOOR = {"errors", "notices", "args"}
SHARED = {*FLOOR, "core", "callbacks", "report", "reporters"}
BELOW: dict[str, set[str]] = {
    "args": FLOOR,
    "core": {*FLOOR, "core"},
    "launch": {*FLOOR, "core", "launch"},
    "speed": {*FLOOR, "snapshot", "core", "speed"},
    "callbacks": SHARED,  # callbacks, the report and reporters live on one floor
    "report": SHARED,
    "reporters": SHARED,
    "hub": {*FLOOR, "core", "hub"},
    "search": {*SHARED, "search"},
    "pt": {*SHARED, "hub", "search", "snapshot", "speed", "device_packages", "pt"},
    "xla": {*SHARED, "snapshot", "speed", "pt", "xla"},
    "neuron": {*SHARED, "snapshot", "speed", "pt", "xla", "neuron"},
    "keras": {*SHARED, "hub", "search", "keras"},
    "tf": {*SHARED, "keras", "tf"},
    # Of tf only what a user who has TensorFlow passes; see test_jax_imports_tensorflow_for_what_is_made_of_it.
    "jax": {*SHARED, "keras", "tf", "jax"},
    "compat": {*SHARED, "pt", "compat", "__init__"},
    "tasks": {*SHARED, "pt", "tasks"},
    "config": {*SHARED, "pt", "tasks", "config"},
    "cli": {
        *(*SHARED, "search", "compat", "config", "tasks", "speed", "launch"),
        *("pt", "xla", "neuron", "keras", "tf", "jax", "cli"),
    },
}
"""What a package may import from, by name or by a string; everything else is above it."""

LONG = 400
LONGER: dict[str, str] = {
    "pt/trainer.py": "the list of override points",
    "keras/trainer.py": "the list of override points",
    "speed/engine.py": "the way of an update: planned, laid out, installed, compared, removed",
}
"""Files of more than 400 lines, and why they lose by being cut. A new row needs nothing but a good reason."""

BY_STRING: dict[str, str] = {
    "__init__.py": "public names are imported on first use, so that `import loopwright` brings no framework",
    "device_packages.py": "a device's package is above pt, and is imported when such a device is in use",
    "cli/main.py": "a command is imported when it is the one that runs",
    "cli/commands/doctor.py": "a check in processes of its own is started with -m",
    "cli/drill/drill_child.py": "says in its usage what it is started as",
    "cli/commands/dryrun.py": "the module is the user's",
    "cli/drill/processes.py": "the child of a drill is started with -m",
    "compat/names.py": "a table of transformers' modules",
    "core/checkpoint/remote.py": "fsspec is optional, and core names no package it cannot be without",
    "pt/data/columns.py": "the home of a collator is compared, nothing is imported",
    "pt/optim/optimizers/packaged.py": "a table of other packages' optimizers",
    "tasks/model/import_path.py": "an import path is the user's",
    "reporters/registry.py": "a reporter is imported when `report_to` names it",
}
"""Files that name modules by strings, and why: what reads the code cannot follow these."""

OURS_EVERYWHERE = {"_loopwright"}
"""What is ours behind a trainer: its only private name, which every part may use."""
OF_OTHERS: dict[str, str] = {
    **dict.fromkeys(("_replace", "_asdict", "_fields", "_make"), "named tuples, where they are public"),
    **dict.fromkeys(("_parameters", "_buffers", "_modules"), "torch.nn.Module, which has no other way to replace one"),
    "_version": "torch.Tensor, the only witness of a change in place",
    "_iterator": "torch's DataLoader with persistent workers",
    "_learning_rate": "optimizers of Keras, whose public name hides a schedule",
    "_loss_function": "models of transformers, whose public name warns",
}
"""Private names of other packages that some file of ours happens to have as well, and why they are used."""


READS_ALL = pytest.mark.xdist_group("house")
"""Tests that read all files: in one process, so that each is parsed once."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def code_nodes(path: Path) -> Iterator[ast.AST]:
    """The nodes of a file's code, without docstrings."""
    words = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
    return (node for node in nodes_of(path) if not isinstance(node, ast.Constant) or id(node) not in words)


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, at the top or inside a function, as an absolute name.

    What is only for type checkers does not count.
    """
    tree = tree_of(path)
    package = ["loopwright", *path.relative_to(PACKAGE).parent.parts]
    for node in _run_time_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            if module == "loopwright":  # `from .. import core` names a package
                yield from (f"loopwright.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            yield ast.literal_eval(node.args[0])


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _run_time_nodes(other)
            continue
        yield child
        yield from _run_time_nodes(child)


def _is_import_call(node: ast.Call) -> bool:
    named = bool(node.args) and isinstance(node.args[0], ast.Constant)
    return _called(node) in ("import_module", "__import__") and named


def _called(node: ast.Call) -> str:
    """The last word of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@READS_ALL
def test_core_and_args_import_no_framework_and_keras_no_backend():
    foreign = [
        f"{relative(path)}: {name}"
        for path in [*FRAMEWORK_FREE, *(PACKAGE / "keras").rglob("*.py")]
        for name in imports(path)
        if name.split(".")[0]
        not in {*sys.stdlib_module_names, *ALLOWED[path.relative_to(PACKAGE).parts[0]], "loopwright"}
    ]
    assert not foreign


def test_jax_imports_tensorflow_for_what_is_made_of_it():
    found = {name for path in (PACKAGE / "jax").rglob("*.py") for name in imports(path)}
    assert not {name for name in found if name.split(".")[0] == "tensorflow"}
    assert {name for name in found if name.startswith("loopwright.tf")} == {
        "loopwright.tf.pipelines",
        "loopwright.tf.summary_writer",
    }


@READS_ALL
def test_packages_import_only_what_is_below_them():
    above = []
    for path in FILES:
        package = path.relative_to(PACKAGE).parts[0]
        if package not in BELOW:
            continue  # a module beside the packages
        for name in {*imports(path), *(text for _, text in module_strings(path))}:
            room = name.split(".")[1] if name.startswith("loopwright.") else None
            room = home_of(room) if room is not None else None
            if room is not None and room not in BELOW[package]:
                above.append(f"{relative(path)}: {name}")
    assert not above


def home_of(name: str) -> str | None:
    """The package of a name that was imported from loopwright itself; None for its version."""
    return loopwright._HOME[name].split(".")[0] if name in loopwright._HOME else None if name.startswith("__") else name


def test_every_package_has_its_place():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {*BELOW}


MODULE = re.compile(r"loopwright(\.[a-z_][a-z_0-9]*){2,}")


@cache
def module_strings(path: Path) -> list[tuple[int, str]]:
    """Strings in the code that name modules of loopwright by two words or more, with their lines."""
    found = []
    for node in code_nodes(path) if "loopwright." in path.read_text(encoding="utf-8") else []:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = MODULE.match(node.value)
            if match is not None and _is_module(match.group()):
                found.append((node.lineno, match.group()))
    return found


def _is_module(name: str) -> bool:
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


@READS_ALL
def test_modules_are_named_by_strings_only_where_there_is_a_reason():
    found = {relative(path) for path in FILES if module_strings(path) or _imports_by_string(path)}
    assert found - {*BY_STRING} == set(), "import them, or give a reason in BY_STRING"
    assert {*BY_STRING} - found == set(), "these name none any more"


def _imports_by_string(path: Path) -> bool:
    """Whether a file imports something whose name is not written there, or is one of ours."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            name = node.args[0]
            if not isinstance(name, ast.Constant) or str(name.value).startswith((".", "loopwright")):
                return True
    return False


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
    run_python(code + "\nfrom loopwright.core.measure.host_memory import host_peak\nassert host_peak() == 0")


def test_import_brings_little_of_the_standard_library():
    """Under 100 ms, even on a slow machine: 30 modules when this was written."""
    code = "import sys; before = set(sys.modules); import loopwright; print(*sorted(set(sys.modules) - before))"
    loaded = run_python(code).split()
    assert [name for name in loaded if name.startswith("loopwright")] == ["loopwright"] and len(loaded) < 50


NAMES = {family: [name for name, home in loopwright._HOME.items() if home.startswith(f"{family}.")] for family in BELOW}


@pytest.mark.xdist_group("tensorflow")
@pytest.mark.parametrize("package", ["keras", "tf", "jax"])
def test_public_names_of_keras_are_there(package):
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    if package == "jax":
        pytest.importorskip("jax", reason="JAX is not installed")
    assert NAMES[package] and missing_names(NAMES[package]) == []


def test_public_names_are_there():
    rest = {*loopwright._HOME} - {*NAMES["keras"], *NAMES["tf"], *NAMES["jax"]}
    assert rest and missing_names(rest) == []


def missing_names(names: Iterable[str]) -> list[str]:
    """Public names that are not what their module has, or are not listed."""
    listed = {*dir(loopwright)} & {*loopwright.__all__}
    return [
        name
        for name in names
        if name not in listed
        or getattr(loopwright, name) is not getattr(import_module(f"loopwright.{loopwright._HOME[name]}"), name)
    ]


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


PIPES = {"search/transfer.py": "between the processes of one search, through pipes"}
"""Files that pickle, and why nothing foreign is loaded."""


def test_nothing_is_unpickled():
    words = re.compile(r"\b(import|from) (c?pickle|dill|cloudpickle|joblib)\b|\bpickle\.|weights_only\s*=\s*False")
    guilty = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(_code_lines(path), start=1)
        if words.search(line) and relative(path) not in PIPES
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


@READS_ALL
def test_public_functions_of_core_and_args_are_annotated():
    bare = [
        f"{relative(path)}: {name}"
        for path in FRAMEWORK_FREE
        for name, function in _public_functions(tree_of(path))
        if not _annotated(function)
    ]
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


LOOSE_ARGS = 30
"""Places that may take arguments of any type; the others name the group they read, or all arguments."""


@READS_ALL
def test_arguments_have_types():
    loose = [f"{relative(path)}:{line}" for path in FILES for line in loose_args(path)]
    assert len(loose) <= LOOSE_ARGS, f"name the group of args/ that is read, as in args: OptimizerArgs: {loose}"


def loose_args(path: Path) -> Iterator[int]:
    """The lines of a file with a parameter, a variable or an attribute `args: Any`; `*args` is another matter."""
    stars = {id(node.vararg) for node in nodes_of(path) if isinstance(node, ast.arguments)}
    for node in nodes_of(path):
        named = isinstance(node, ast.arg) and node.arg == "args" and id(node) not in stars
        named = named or (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in ("args", "self.args"))
        if named and node.annotation is not None and ast.unparse(node.annotation) in ("Any", "Any | None"):
            yield node.lineno


def test_a_long_file_has_a_reason():
    long = {relative(path) for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > LONG}
    assert long - {*LONGER} == set(), "two subjects, perhaps? If not, say in LONGER why one"
    assert {*LONGER} - long == set(), "these are no longer long"


# ---- walls ---------------------------------------------------------------------------------------------------------


@READS_ALL
def test_what_is_private_stays_in_its_module():
    """`x._name` of another object, where the name is defined in our package but not in this file."""
    ours = {name for path in FILES for name in private_names(path)}
    points = override_points()
    guilty = []
    for path in FILES:
        own = private_names(path)
        for line, base, name in private_uses(path):
            is_point = name in points and base.split(".")[-1] == "trainer"
            if name in ours and name not in own and not is_point:
                guilty.append(f"{relative(path)}:{line}: {base}.{name}")
    assert not guilty, "make it public, or ask the object to do it"


@cache
def private_names(path: Path) -> frozenset[str]:
    """Names with an underscore that a file defines: functions, classes, variables, and attributes of its objects."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and _is_own(node.value):
            found.add(node.attr)
    return frozenset(name for name in found if _is_private(name)) - {*OF_OTHERS} - OURS_EVERYWHERE


def private_uses(path: Path) -> Iterator[tuple[int, str, str]]:
    """Every `base._name`, `getattr(base, "_name")` and `from base import _name` whose base is another object."""
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if not _is_own(node.value) and ast.unparse(node.value) != "super()":
                yield node.lineno, ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and _called(node) in ("getattr", "hasattr", "setattr"):
            base, *rest = map(ast.unparse, node.args)
            name = rest[0].strip("'") if rest else ""
            if _is_private(name) and rest[0] != name and base not in ("self", "cls"):
                yield node.lineno, base, name
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("loopwright")):
            for alias in node.names:
                if _is_private(alias.name):
                    yield node.lineno, node.module or ".", alias.name


def _is_own(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and base.id in ("self", "cls")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def override_points() -> set[str]:
    """Private names that are a user's: methods and attributes of the trainers, which have them from transformers."""
    points = set()
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Trainer"):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef):
                        points.add(each.name)
                    elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        points.add(each.target.id)
    return {name for name in points if _is_private(name)}


BROAD = {"Exception", "BaseException"}


@READS_ALL
def test_a_broad_except_says_why():
    silent = []
    for path in FILES:
        reasons = comments(path)
        for line in broad_excepts(path):
            if not reasons & {line, line + 1}:
                silent.append(f"{relative(path)}:{line}")
    assert not silent, "narrow it, or give the reason in a comment on that line or the next"


def broad_excepts(path: Path) -> Iterator[int]:
    """The lines of a file that catch any error whatever."""
    for node in nodes_of(path):
        if isinstance(node, ast.ExceptHandler):
            is_broad = node.type is None or _is_broad([node.type])
        else:
            is_broad = isinstance(node, ast.Call) and _called(node) == "suppress" and _is_broad(node.args)
        if is_broad:
            yield node.lineno


def _is_broad(types: Iterable[ast.expr]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in BROAD for each in types for node in ast.walk(each))


def comments(path: Path) -> set[int]:
    """The lines of a file with a comment for people: those for tools give no reason."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    for_tools = re.compile(r"# *(type:|noqa|fmt:)[^#]*$")
    return {each.start[0] for each in tokens if each.type == tokenize.COMMENT and not for_tools.match(each.string)}


def test_the_walls_hold(tmp_path, monkeypatch):
    """Each wall sees what it is there for."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "core").mkdir()
    path = tmp_path / "core" / "b.py"
    path.write_text(
        "from .a import _one\nimport contextlib\n"
        "def f(x, self):\n    try:\n        x._two + self._three + getattr(x, '_four')\n"
        "    except (OSError, Exception):  # noqa\n        pass\n    except:\n        # told above\n        pass\n"
        "    with contextlib.suppress(BaseException):\n        pass\n"
        "def g(self, args, strategy: Any):\n    self.strategy.one + args.strategy.two\n    hasattr(strategy, 'a')\n"
    )
    loose = tmp_path / "core" / "c.py"
    loose.write_text(
        "class A:\n    args: Any\n    other: Any\n"
        "def f(args: Any = None): ...\ndef g(*args: Any, kwargs: Any): ...\ndef h(args: DataArgs): ...\n"
    )
    assert sorted(loose_args(loose)) == [2, 4]
    assert {name for _, _, name in private_uses(path)} == {"_one", "_two", "_four"}
    assert private_names(path) == {"_three"}
    assert list(broad_excepts(path)) == [6, 8, 11]
    assert comments(path) == {9}
    assert [name for _, _, name in strategy_uses(path)] == ["one"]
    assert sorted(untyped_strategies(path)) == [13, 15]


# ---- contracts -------------------------------------------------------------------------------------------------------

CONTRACTS: dict[str, str] = {
    **dict.fromkeys(("core", "hub", "search"), "StepwiseStrategy"),
    **dict.fromkeys(("pt", "xla", "neuron", "cli", "config"), "SingleDevice"),
    "keras": "KerasStrategy",
    "tf": "TFStrategy",
    "jax": "JaxStrategy",
}
"""The class that declares what a package uses of a strategy."""
OTHER_STRATEGIES: dict[str, str] = {
    "keras/arguments.py": "where TensorFlow or JAX computes",
    "pt/data/collators/onepass.py": "how a tokenizer pads",
}
"""Files that call something else a strategy."""


@READS_ALL
def test_what_is_used_of_a_strategy_is_declared():
    unknown = []
    for path in FILES:
        package = path.relative_to(PACKAGE).parts[0]
        for line, base, name in strategy_uses(path) if relative(path) not in OTHER_STRATEGIES else ():
            contract = "ManyProcesses" if base == "self.processes" else CONTRACTS.get(package)
            if contract is None or name not in declared(contract):
                unknown.append(f"{relative(path)}:{line}: {base}.{name}")
    assert not unknown, "declare it in the class that CONTRACTS names"


@READS_ALL
@pytest.mark.parametrize(
    ("kind", "protocol"),
    [
        ("NumpyStrategy", "StepwiseStrategy"),
        ("SingleDevice", "StepwiseStrategy"),
        ("KerasStrategy", "CompiledStrategy"),
    ],
)
def test_strategies_have_every_member_of_their_protocol(kind, protocol):
    assert declared(protocol) - declared(kind, without=("Strategy", "StepwiseStrategy")) == set()


@READS_ALL
def test_a_strategy_has_a_type():
    """What is `Any`, or asked whether it has a member, is read by no type checker."""
    loose = [f"{relative(path)}:{line}" for path in FILES for line in untyped_strategies(path)]
    assert not loose


def strategy_uses(path: Path) -> Iterator[tuple[int, str, str]]:
    """Every member a file uses of a strategy; `self.processes` is one where processes talk to each other."""
    of_strategies = path.parent.name == "strategies"  # there `self.processes` are the processes themselves
    for node in nodes_of(path):
        if not isinstance(node, ast.Attribute):
            continue
        base = ast.unparse(node.value) if isinstance(node.value, (ast.Attribute, ast.Name)) else ""
        if _names_strategy(base) or (base == "self.processes" and not of_strategies and _is_internal(path)):
            yield node.lineno, base, node.attr


def _names_strategy(base: str) -> bool:
    """Whether an expression is a strategy; that of arguments says where TensorFlow or JAX computes."""
    *owners, last = base.split(".")
    return last in ("strategy", "_strategy") and owners[-1:] != ["args"]


def _is_internal(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0] in ("pt", "neuron")


def untyped_strategies(path: Path) -> Iterator[int]:
    """The lines of a file where a strategy is declared as `Any`, or asked for a member by a string."""
    for node in nodes_of(path):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            is_loose = _names_strategy(name) and ast.unparse(node.annotation) == "Any"
        else:
            by_string = isinstance(node, ast.Call) and _called(node) in ("getattr", "hasattr") and node.args
            is_loose = bool(by_string) and _names_strategy(ast.unparse(node.args[0]))
        if is_loose:
            yield node.lineno


@cache
def strategy_classes() -> dict[str, ast.ClassDef]:
    """The classes of strategies, by name."""
    ours = [*PACKAGE.glob("*/*strategy.py"), *(PACKAGE / "pt" / "strategies").glob("*.py")]
    places = [*ours, ROOT / "tests" / "core" / "numpy_strategy.py"]
    return {node.name: node for path in places for node in tree_of(path).body if isinstance(node, ast.ClassDef)}


@cache
def declared(name: str, without: tuple[str, ...] = ()) -> frozenset[str]:
    """The public members of a class and its bases: declared in the class, or assigned in its `__init__`."""
    found: set[str] = set()
    if name not in strategy_classes() or name in without:
        return frozenset()
    node = strategy_classes()[name]
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            found.add(each.name)
        elif isinstance(each, (ast.Assign, ast.AnnAssign)):
            found.update(part.id for part in ast.walk(each) if _is_stored(part) and isinstance(part, ast.Name))
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            stored = (part for part in ast.walk(each) if _is_stored(part) and isinstance(part, ast.Attribute))
            found.update(part.attr for part in stored if _is_own(part.value))
    found = found.union(*(declared(ast.unparse(base), without) for base in node.bases))
    return frozenset(name for name in found if not name.startswith("_"))


def _is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


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


@READS_ALL
def test_tests_of_a_group_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """What is costly to build is built once: pytest-xdist 3.8 cannot tell groups to pytest 9.2."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("not among several processes")
    assert request.node.nodeid.endswith("@house")
