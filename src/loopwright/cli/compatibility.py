"""The generated part of docs/compatibility.md: public names of transformers' Trainer and what loopwright has."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

from ..args.groups.optimizer import why_refused
from .compatibility_notes import ABSENT, BETTER, NAMES

BEGIN, END = "<!-- generated -->", "<!-- end -->"
TITLE = "# Compatibility with transformers\n\n"


def compatibility_page(before: str | None) -> str | None:
    """The page with its generated part renewed; the rest of `before` is kept. None if transformers is missing."""
    try:
        import transformers
    except ModuleNotFoundError:
        return before
    text = before if before is not None and BEGIN in before and END in before else f"{TITLE}{BEGIN}\n{END}\n"
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n{_generated(transformers.__version__)}{END}{tail}"


def _generated(version: str) -> str:
    sections = [
        ("Arguments", "argument", arguments()),
        ("Methods", "method", methods()),
        ("Events", "event", events()),
        ("Callbacks", "callback", callbacks()),
        ("Optimizers", "optimizer", optimizers()),
        ("Schedules", "schedule", schedules()),
    ]
    tables = [_table(title, [(name, _status(kind, name, own)) for name, own in rows]) for title, kind, rows in sections]
    head = (
        f"Compared with transformers {version}. **same**: the same name, meaning and default. **better**: the same, "
        "and more. **not available**: refused by name, with the reason.\n\n"
    )
    return head + "\n".join(tables) + "\n" + _third_parties()


def _status(kind: str, name: str, own: str) -> str:
    """The cell of a name; `own` is empty if it is the same here, or says what differs."""
    if name in ABSENT[kind]:
        return f"not available: {ABSENT[kind][name]}"
    if own.startswith("not available"):
        return own
    better = f"better: {BETTER[kind][name]}" if name in BETTER[kind] else ""
    return "; ".join(filter(None, [better, own])) or "same"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    counts = {
        word: sum(cell.startswith(word) for _, cell in rows) for word in ("same", "better", "differs", "not available")
    }
    counted = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    lines = [f"| `{name}` | {cell} |" for name, cell in rows]
    return "\n".join([f"## {title}", "", f"{len(rows)}: {counted}.", "", "| name | |", "|---|---|", *lines]) + "\n"


def _third_parties() -> str:
    lines = [f"| `{name}` | {who} | {how} |" for name, who, how in NAMES]
    return "\n".join(["## Names that other libraries use", "", "| name | who | how |", "|---|---|---|", *lines]) + "\n"


# ---- rows -----------------------------------------------------------------------------------------------------------


def arguments() -> list[tuple[str, str]]:
    """Every argument, and what differs."""
    from transformers import Seq2SeqTrainingArguments as Reference

    from ..pt.arguments import Seq2SeqTrainingArguments as Own

    expected, found = _defaults(Reference), _defaults(Own)
    rows = []
    for name, default in expected.items():
        own = "not available" if name not in found else ""
        if name in found and repr(found[name]) != repr(default):
            own = f"differs: the default is `{found[name]!r}`, not `{default!r}`"
        rows.append((name, own))
    return rows


def _defaults(cls: Any) -> dict[str, Any]:
    return {
        each.name: each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
        for each in dataclasses.fields(cls)
        if each.init
    }


def methods() -> list[tuple[str, str]]:
    """Every public method of the trainers, and the override points with an underscore that both have."""
    from transformers import Seq2SeqTrainer as Reference

    from ..core.user_code.overrides import NEVER_CALLED
    from ..pt.seq2seq import Seq2SeqTrainer as Own

    rows = []
    for name, method in inspect.getmembers(Reference, inspect.isroutine):
        if name.startswith("__") or (name.startswith("_") and not hasattr(Own, name)):
            continue
        own = ""
        if not hasattr(Own, name):
            own = f"not available: override {NEVER_CALLED[name]}" if name in NEVER_CALLED else "not available"
        else:
            missing = _missing_parameters(method, getattr(Own, name))
            own = f"differs: no parameter {', '.join(f'`{each}`' for each in missing)}" if missing else ""
        rows.append((name, own))
    return rows


def _missing_parameters(expected: Any, method: Any) -> list[str]:
    own = inspect.signature(method).parameters
    if any(each.kind is each.VAR_KEYWORD for each in own.values()):
        return []
    stars = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    wanted = [name for name, each in inspect.signature(expected).parameters.items() if each.kind not in stars]
    return [name for name in wanted if name not in own and name != "self"]


def events() -> list[tuple[str, str]]:
    from transformers import TrainerCallback as Reference

    from ..core.events import TrainerCallback as Own

    return [(name, "" if hasattr(Own, name) else "not available") for name in dir(Reference) if name.startswith("on_")]


def callbacks() -> list[tuple[str, str]]:
    """Every callback class; that of a tracker whose service has ended is refused."""
    from transformers import trainer_callback
    from transformers.integrations import integration_utils

    import loopwright

    names = dict.fromkeys(
        name
        for module in (trainer_callback, integration_utils)
        for name, each in vars(module).items()
        if inspect.isclass(each) and name.endswith("Callback")
    )
    missing = "not available: the service of Neptune ended in March 2026"
    return [(name, "" if name in loopwright.__all__ else missing) for name in names]


def optimizers() -> list[tuple[str, str]]:
    from transformers.training_args import OptimizerNames

    from ..pt.optim.optimizers.table import OPTIMIZERS

    return [(each.value, _row_of(OPTIMIZERS, each.value)) for each in OptimizerNames]


def _row_of(table: Any, name: str) -> str:
    if name not in table:
        return "not available"
    if why_refused(name) is not None:
        return "not available: it updates weights in the backward pass, before gradients are accumulated or clipped"
    return ""


def schedules() -> list[tuple[str, str]]:
    from transformers.trainer_utils import SchedulerType

    from ..args.names import SchedulerType as Own

    known = _values(Own)
    return [(each.value, "" if each.value in known else "not available") for each in SchedulerType]


def _values(names: Iterable[Any]) -> set[str]:
    return {each.value for each in names}
