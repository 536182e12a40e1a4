"""Reading a configuration: file, overrides, checks, derived values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..args.field import Spec, advised, nearest, specs
from ..args.problems import shown
from ..args.reading import check, read
from ..errors import ArgumentsError, NotAvailable
from ..tasks.declaration import Task
from ..tasks.fields import DataFields, LoraFields, ModelFields
from ..tasks.table import TASKS
from .config import Config
from .derived import GENERATED, derived_arguments, is_on
from .document import Document, read_document
from .names import Names, TopFields
from .overrides import Override, read_overrides
from .paths import resolved_path
from .source import Source

Block = TypeVar("Block")
EXAMPLES = {"model": "{name: mlp}", "data": "{train: train.csv}", "lora": "{r: 16}"}
"""A value of each block, for messages."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration; raises ArgumentsError with all problems, each with its place.

    `overrides` are words of a command line (`learning_rate=1e-4`, `--data.max_length 128`).
    """
    return _Loading(read_document(Path(path)), list(overrides)).config()


class _Loading:
    """One configuration while it is read."""

    def __init__(self, document: Document, words: list[str]) -> None:
        self.document = document
        self.problems: list[str] = []
        self.sources: dict[str, Source] = {}
        self.task = self._find_task(words)
        self.names = Names(self.task)
        self.overrides = read_overrides(words, self.names.spec)

    def config(self) -> Config:
        values = self._values()
        top = self._block("", TopFields, {name: values.pop(name) for name in ("task", "metrics") if name in values})
        model = self._block("model", ModelFields, self._mapping(values.pop("model", None), "model"))
        data = self._block("data", self.task.data, self._mapping(values.pop("data", None), "data"))
        given = values.pop("lora", None)
        lora = None if given is None else self._block("lora", LoraFields, self._mapping(given, "lora"))
        self._check_needed(model, data)
        metrics = self._metrics(top.metrics)
        arguments = self._arguments(values)
        self._check_evaluation(data, arguments)
        self._check_weights(data, arguments)
        if data.validation is not None or data.validation_share:
            self._check_generation(metrics, arguments)
        self._stop_if_wrong()
        for name, (value, reason) in derived_arguments(self.document.path, self.task, data, metrics, arguments).items():
            arguments[name] = value
            self.sources[name] = Source("derived", reason)
        args = self._training_arguments(arguments)
        return Config(self.document.path, self.task, model, data, lora, metrics, args, self.sources)

    # ---- the task ----------------------------------------------------------------------------------------------------

    def _find_task(self, words: list[str]) -> Task:
        """The task, which is read first: it determines the keys that exist."""
        flags = [each for each in read_overrides(words, lambda key: None) if each.key == "task"]
        name, place = self.document.values.get("task"), self.document.place("task")
        if flags:
            name, place = flags[-1].text, "command line"
        if name is None:
            raise ArgumentsError(f"{place}: there is no key 'task'; set it to one of {', '.join(TASKS)}")
        if not isinstance(name, str) or name not in TASKS:
            raise ArgumentsError(
                f"{place}: {shown('task', name)} is not a task{nearest(str(name), TASKS) or '.'} "
                f"There are {', '.join(TASKS)}"
            )
        return TASKS[name]

    # ---- values ------------------------------------------------------------------------------------------------------

    def _values(self) -> dict[str, Any]:
        """The values of the file with the overrides applied; unknown keys are recorded as problems."""
        values: dict[str, Any] = {}
        for key, value in self.document.values.items():
            place = self.document.place(key)
            unknown = self.names.problem(key)
            if unknown is not None:
                self.problems.append(f"{place}: {unknown}")
                continue
            values[key] = dict(value) if isinstance(value, dict) else value
            self._note(key, value, place)
        for override in self.overrides:
            self._apply(values, override)
        return values

    def _note(self, key: str, value: Any, place: str) -> None:
        self.sources[key] = Source("file", place)
        if isinstance(value, dict) and self.names.is_block(key):
            for inner in value:
                self.sources[f"{key}.{inner}"] = Source("file", self.document.place(key, inner))

    def _apply(self, values: dict[str, Any], override: Override) -> None:
        unknown = self.names.problem(override.key)
        if unknown is not None:
            self.problems.append(f"command line: {unknown}")
            return
        is_mapping = self.names.is_block(override.key) and (override.text or "").lstrip().startswith("{")
        value = override.value(None if is_mapping else self.names.spec(override.key))
        block, _, key = override.key.partition(".")
        if key:
            before = values.get(block)
            inner = self._mapping(before, block) if before is not None else {}
            values[block] = {**inner, key: value}
        else:
            values[block] = value
            for other in [each for each in self.sources if each.startswith(f"{block}.")]:
                del self.sources[other]
            if isinstance(value, dict) and self.names.is_block(block):
                self.sources.update({f"{block}.{inner}": Source("flag", override.shown) for inner in value})
        self.sources[override.key] = Source("flag", override.shown)

    def _mapping(self, value: Any, block: str) -> dict[str, Any]:
        """The values of a block; `model: NAME` is short for a block with that name."""
        if isinstance(value, str) and block == "model":
            source = self.sources.get("model")
            if source is not None:
                self.sources["model.name"] = source
            return {"name": value}
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self.problems.append(
            f"{self._place(block)}: {shown(block, value)}: must be a mapping of keys to values, such as "
            f"{EXAMPLES[block]}"
        )
        return {}

    def _place(self, key: str) -> str:
        source = self.sources.get(key) or self.sources.get(key.rpartition(".")[0])
        return source.shown if source is not None else str(self.document.path)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _block(self, name: str, kind: type[Block], values: Mapping[str, Any]) -> Block:
        """A block as an object of its class; problems are recorded with their places."""
        read_values = {}
        for key, spec in specs(kind).items():
            if key in values:
                dotted = f"{name}.{key}" if name else key
                value = self._checked(dotted, spec, values[key])
                read_values[key] = resolved_path(dotted, value, self.document.path.parent, self.sources.get(dotted))
        for key in values:
            unknown = self.names.problem(f"{name}.{key}") if name else None
            if unknown is not None:
                self.problems.append(f"{self._place(f'{name}.{key}')}: {unknown}")
        return kind(**read_values)

    def _checked(self, key: str, spec: Spec, value: Any) -> Any:
        """The value as its field's type; a problem is recorded, and the default used instead."""
        try:
            result = read(spec, value)
            complaint = check(spec, result)
        except ValueError as error:
            advice = "; put it in quotes" if str(error).endswith("is not text") else ""
            result, complaint = spec.default, f"{error}{advice}"
            self.problems.append(f"{self._place(key)}: {key}: {complaint}")
            return result
        if complaint is None:
            return result
        self.problems.append(f"{self._place(key)}: {shown(key, value)}: {complaint}")
        return spec.default

    def _check_needed(self, model: ModelFields, data: DataFields) -> None:
        path = self.document.path
        for key, value in (("model.name", model.name), ("data.train", data.train)):
            block, _, inner = key.partition(".")
            is_said = any(f" {key}" in problem or f" {block}=" in problem for problem in self.problems)
            if value is None and not is_said:
                self.problems.append(f"{path}: there is no {key}; add '{inner}' to the block '{block}'")
        if data.validation is not None and data.validation_share is not None:
            self.problems.append(
                f"{self._place('data.validation_share')}: data.validation and data.validation_share are both set; "
                "remove one of them"
            )

    def _check_evaluation(self, data: DataFields, arguments: Mapping[str, Any]) -> None:
        strategy = arguments.get("eval_strategy", False)
        if strategy not in (False, "no") and data.validation is None and not data.validation_share:
            self.problems.append(
                f"{self._place('eval_strategy')}: {shown('eval_strategy', strategy)}, but there is no validation data; "
                "set data.validation or data.validation_share, or remove it"
            )

    def _check_weights(self, data: DataFields, arguments: Mapping[str, Any]) -> None:
        if arguments.get("train_dataset_weights") and isinstance(data.train, str):
            self.problems.append(
                f"{self._place('train_dataset_weights')}: train_dataset_weights needs several sources in data.train, "
                "such as {web: web.jsonl, code: code.jsonl}; name them, or remove the weights"
            )

    def _check_generation(self, metrics: list[str], arguments: Mapping[str, Any]) -> None:
        compared = sorted(GENERATED & {*metrics}) if self.task.generates else []
        if compared and not is_on(arguments.get("predict_with_generate", True)):
            self.problems.append(
                f"{self._place('predict_with_generate')}: predict_with_generate=False, but the metric {compared[0]} "
                "compares generated texts; remove it, or set metrics: []"
            )

    def _metrics(self, wanted: list[str] | str | None) -> list[str]:
        known = self.task.metrics
        names = [wanted] if isinstance(wanted, str) else wanted
        if names is None:
            return list(self.task.default_metrics)
        for name in names:
            if name not in known:
                problem = f"{self._place('metrics')}: {name!r} is not a metric of {self.task.name}"
                self.problems.append(advised(problem, name, known, f"there are {', '.join(known) or 'none'}"))
        return list(names)

    # ---- training arguments ------------------------------------------------------------------------------------------

    def _arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {}
        for key, value in values.items():
            spec = self.names.arguments[key]
            self._checked(key, spec, value)
            arguments[key] = resolved_path(key, value, self.document.path.parent, self.sources.get(key))
        return arguments

    def _training_arguments(self, arguments: dict[str, Any]) -> Any:
        try:
            return self.names.arguments_class(**arguments)
        except ArgumentsError as error:
            raise ArgumentsError([self._with_place(problem) for problem in error.problems]) from None
        except NotAvailable as error:
            raise ArgumentsError(self._with_place(str(error))) from None

    def _with_place(self, problem: str) -> str:
        """A problem that the arguments found, with the place of the first one it names."""
        words = problem.replace("=", " ").replace(":", " ").replace(",", " ").split()
        for word in words:
            source = self.sources.get(word)
            if source is not None and source.kind in ("file", "flag"):
                return f"{source.shown}: {problem}"
        return f"{self.document.path}: {problem}"

    def _stop_if_wrong(self) -> None:
        if self.problems:
            raise ArgumentsError(self.problems)
