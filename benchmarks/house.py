"""What a reader and a subclass meet: names on a trainer, frames to the model, loops. Prints ours beside transformers.

python benchmarks/house.py
"""

from __future__ import annotations

import ast
import inspect
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import loopwright
import loopwright.pt.trainer
from loopwright.core.internals import Internals

PACKAGE = Path(loopwright.__file__).parent
ATTRIBUTES = [
    "progress", "meter", "device", "plan", "signals", "strategy", "notices", "checkpoints", "updates", "split", "work",
    "pace", "learning_rate", "spikes", "accounting", "speed", "step", "memory", "splitter", "tokenizer",
]  # fmt: skip
"""Names a user may well give to an attribute of a subclass."""
METHODS = [
    "_log", "_count", "_probe", "_labels_in", "set_up", "_cut", "_share", "_resume", "_skip", "_weighed", "_stamp",
    "_halve", "_announce", "_identity", "_gathered", "_signal", "_veto", "_trimmed",
]  # fmt: skip
"""Names a user may well give to a helper method."""


class Line(nn.Module):
    """One linear layer; notes the stack of its first forward in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.stack: list[str] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        if self.training:
            frame, self.stack = sys._getframe(1), []
            while frame is not None:
                self.stack.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                frame = frame.f_back  # type: ignore[assignment]
        predicted = self.layer(x)
        return {"loss": (predicted - labels).square().mean(), "logits": predicted}


def data() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(2) * i, "labels": torch.ones(1)} for i in range(8)]


def trained(library: Any, kind: type | None = None, prepare: Any = None) -> Any:
    """A trainer of a library after two updates and an evaluation."""
    options = {"max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    args = library.TrainingArguments(tempfile.mkdtemp(), **options)
    trainer = (kind or library.Trainer)(Line(), args, train_dataset=data(), eval_dataset=data())
    if prepare is not None:
        prepare(trainer)
    trainer.train()
    trainer.evaluate()
    return trainer


def names_of(trainer: Any) -> tuple[set[str], set[str]]:
    """Methods and properties, and data attributes, that a live trainer has."""
    plain = {name for name in dir(type(trainer)) if not name.startswith("__")}
    static = {name: inspect.getattr_static(type(trainer), name) for name in plain}
    methods = {name for name, value in static.items() if callable(value) or hasattr(value, "__get__")}
    return methods, set(vars(trainer)) | (plain - methods)


def frames(trainer: Any) -> int:
    """Calls between `train` and the model's forward, both left out of the count of torch's own."""
    stack = trainer.model.stack
    last = max(index for index, name in enumerate(stack) if name.endswith(":train"))
    return sum(not name.startswith("module.py") for name in stack[: last + 1])


def collisions(library: Any, names: list[str], *, methods: bool) -> str:
    """Of names a subclass uses for itself: how many make training crash, and how many are replaced without a word."""
    together = _outcome(library, names, methods=methods)  # names that do no harm together do none alone
    outcomes = [together] if together == "kept" else [_outcome(library, [name], methods=methods) for name in names]
    return f"{outcomes.count('crashed')} / {outcomes.count('replaced')}"


def _outcome(library: Any, names: list[str], *, methods: bool) -> str:
    """What becomes of a run of a subclass that has these names."""
    mine = {name: object() for name in names}

    def method(value: object) -> Any:
        return lambda self, *args, **kwargs: value

    kind = type("Theirs", (library.Trainer,), {name: method(mine[name]) for name in names} if methods else {})

    def assign(trainer: Any) -> None:
        for name in () if methods else names:
            setattr(trainer, name, mine[name])

    try:
        trainer = trained(library, kind, assign)
    except Exception:
        return "crashed"
    found = {name: getattr(trainer, name)() if methods else getattr(trainer, name) for name in names}
    return "kept" if all(found[name] is mine[name] for name in names) else "replaced"


def depth(library: Any) -> int:
    return len(library.Trainer.__mro__) - 2


def loops() -> int:
    """Places where the micro-batches of an update are gone through to be trained on."""
    found = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.unparse(node.iter) if isinstance(node, ast.For) else ""
            found += "update.batches" in text and any(
                word in ast.unparse(node) for word in ("micro_step", "run.step(")
            )
    return found


def table(libraries: tuple[Any, ...]) -> list[list[Any]]:
    """Rows of what is measured and a value for each library, of which loopwright is the first."""
    import transformers

    trainers = [trained(library) for library in libraries]
    names = [names_of(trainer) for trainer in trainers]
    theirs = names_of(trained(transformers))
    known = theirs[0] | theirs[1]
    listed = set(vars(loopwright.pt.trainer.Trainer))
    points = {name for name in vars(transformers.Trainer) if not name.startswith("__")}
    have = {name for name in points if hasattr(loopwright.Trainer, name)}
    behind = [name for name in dir(trainers[0]._loopwright) if not name.startswith("__")]
    rows = [
        ("classes between Trainer and object", [depth(library) for library in libraries]),
        ("methods and properties on a live trainer", [len(methods) for methods, _ in names]),
        ("  of these not transformers'", [len(methods - known) for methods, _ in names]),
        ("data attributes of it", [len(attributes) for _, attributes in names]),
        ("  of these not transformers'", [len(attributes - known) for _, attributes in names]),
        ("override points of transformers: ours / listed", [f"{len(have)} / {len(have & listed)}", len(points)]),
        ("attributes of a subclass: crash / replaced",
         [collisions(library, ATTRIBUTES, methods=False) for library in libraries]),
        ("helper methods of a subclass: crash / replaced",
         [collisions(library, METHODS, methods=True) for library in libraries]),
        ("frames from train() to the model", [frames(trainer) for trainer in trainers]),
        ("places where the loop over micro-batches is written", [loops(), 1]),
        ("names behind a trainer", [len(behind), "-"]),
    ]  # fmt: skip
    return [[what, *values[: len(libraries)]] for what, values in rows]


def main() -> None:
    import transformers

    print(f"{'':60} {'loopwright':>12} {'transformers':>12}")
    for what, mine, theirs in table((loopwright, transformers)):
        print(f"{what:60} {mine!s:>12} {theirs!s:>12}")
    print(f"{'modules':60} {len(list(PACKAGE.rglob('*.py'))):>12}")
    assert issubclass(type(trained(loopwright)._loopwright), Internals)


if __name__ == "__main__":
    main()
