"""Regression and classification of tables and arrays."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..args.field import Group, advised, arg, list_of_names
from ..args.problems import short
from ..errors import ArgumentsError, DataError
from .data.readers import Rows, each_source, missing_file, need_column, read_splits
from .declaration import CLASS_METRICS, Materials, Task
from .fields import DataFields
from .request import Request

LARGEST = 3.4028234e38
"""The largest 32-bit float."""
FEWEST_STEPS = 50
"""Steps of 32-bit numbers within the deviation of a column, below which it is too coarse."""
MLP = "mlp"
"""The name of the model that is made here."""


@dataclass
class TableColumns(Group):
    """Columns of tables, or names of arrays in an .npz file."""

    title = "data"

    target_column: str = arg("target", "The column with the value to predict; of an .npz file, the name of its array.")
    feature_columns: list[str] | None = arg(
        None,
        "The columns with the inputs; defaults to all others. Of an .npz file, the name of one array.",
        check=list_of_names,
    )
    standardize: bool = arg(True, "Scale inputs by the mean and deviation of the training data; saved with the model.")


@dataclass
class TableData(TableColumns, DataFields):
    """The block `data` of tables."""


def _build(request: Request, *, classes: bool) -> Materials:
    import numpy as np
    import torch

    from ..pt.data.collators import DefaultDataCollator
    from .data.labels import class_metrics, label_names, label_notes, with_numbers
    from .metrics import chosen, number_scores
    from .model.table_model import TableModel, multilayer_perceptron

    data: TableData = request.data
    train, held = read_splits(request, _read)
    splits = [rows for rows in (train, held) if rows is not None]
    for rows in splits:
        need_column(rows, data.target_column, "data.target_column", request)
    columns = _features(train, request)
    names = label_names(splits, data.target_column, None, request, order_of_model=False) if classes else []

    def samples(rows: Rows) -> list[dict[str, Any]]:
        inputs = _matrix(rows, columns, request)
        if classes:
            targets: Any = with_numbers(rows, data.target_column, names)
        else:
            targets = _targets(rows, request)
        return [{"features": inputs[index], "labels": targets[index]} for index in range(len(rows))]

    inputs = _matrix(train, columns, request)
    if str(request.model.name) == MLP:
        _check_mlp(request)
        torch.manual_seed(request.seed)
        body = multilayer_perceptron(int(np.prod(inputs.shape[1:])), max(1, len(names)), request)
    else:
        body = _body(request)
    model = TableModel(body, inputs if data.standardize else None, classes=len(names))
    metrics = request.metrics

    def compute(prediction: Any) -> dict[str, float]:
        return chosen(metrics, lambda: number_scores(prediction.predictions, np.asarray(prediction.label_ids)))

    return Materials(
        model=model,
        train_dataset=each_source(train, samples),
        eval_dataset=None if held is None else samples(held),
        data_collator=DefaultDataCollator(),
        compute_metrics=class_metrics(metrics) if classes else compute if metrics else None,
        notes=[
            *(label_notes(train, held, data.target_column) if classes else []),
            *_coarse(train, columns if classes else [*columns, data.target_column]),
        ],
    )


def _check_mlp(request: Request) -> None:
    """Raise if something is set that a new multilayer perceptron does not use."""
    if request.lora is not None:
        raise ArgumentsError(f"{request.place('lora')} adapts trained weights, and {MLP!r} has none; remove it")
    for key, value in (("tokenizer", None), ("dtype", "float32")):
        if getattr(request.model, key) != value:
            advice = "; set bf16 to compute in 16 bits" if key == "dtype" else ""
            raise ArgumentsError(f"{request.place(f'model.{key}')} is not for the model {MLP!r}; remove it{advice}")


def _body(request: Request) -> Any:
    from .model.import_path import is_import_path
    from .model.models import load_model

    if not is_import_path(str(request.model.name)):
        raise ArgumentsError(
            f"{request.place('model.name')}={request.model.name!r} must be {MLP!r}, or an import path: file.py:name"
        )
    return load_model(request, "")


# ---- data ------------------------------------------------------------------------------------------------------------


def _read(request: Request, split: str, source: str) -> Rows:
    from .data.readers import read_source

    return _arrays(Path(source), request, split) if source.endswith(".npz") else read_source(request, split, source)


def _arrays(path: Path, request: Request, split: str) -> Rows:
    """The arrays of an .npz file as rows; nothing in it is unpickled."""
    import numpy as np

    place = request.place(f"data.{split}")
    if not path.is_file():
        raise missing_file(place, str(path))
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{place}: {path} is not a file of numpy's savez with plain arrays ({error})") from None
    if not arrays:
        raise DataError(f"{place}: {path} has no arrays")
    lengths = {len(array) for array in arrays.values() if array.ndim}
    if len(lengths) != 1 or any(not array.ndim for array in arrays.values()):
        raise DataError(f"{place}: the arrays of {path} must have the same length; they have {sorted(lengths)}")
    if lengths == {0}:
        raise DataError(f"{place}: {path} has no rows")
    rows = [{name: array[index] for name, array in arrays.items()} for index in range(lengths.pop())]
    return Rows([{name: _plain(value) for name, value in row.items()} for row in rows], str(path))


def _plain(value: Any) -> Any:
    return value.item() if not value.ndim else value


def _features(rows: Rows, request: Request) -> list[str]:
    data: TableData = request.data
    if data.feature_columns is None:
        found = [name for name in rows[0] if name != data.target_column]
        if not found:
            raise DataError(f"{rows.name} has no column besides {data.target_column!r}")
        return found
    _check_features(data, request.place("data.feature_columns"))
    for name in data.feature_columns:
        if name not in rows[0]:
            problem = f"{request.place('data.feature_columns')}: {rows.name} has no column {name!r}"
            raise ArgumentsError(advised(problem, name, rows[0], f"it has {', '.join(rows[0])}"))
    return data.feature_columns


def _check_features(data: TableData, place: str) -> None:
    """Raise if the list of the inputs is empty, or has the target, or a column twice."""
    names = data.feature_columns or []
    if not names:
        raise ArgumentsError(f"{place} is empty; list the columns with the inputs, or remove it to use all others")
    if data.target_column in names:
        raise ArgumentsError(
            f"{place} has {data.target_column!r}, which is data.target_column: the model would be given what it is to "
            "predict; remove it there"
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentsError(f"{place} has {twice!r} more than once; remove one of them")


def _targets(rows: Rows, request: Request) -> Any:
    """The target of each row as a number."""
    values = _matrix(rows, [request.data.target_column], request)
    if values.shape[1:] != (1,):
        shape = "x".join(map(str, values.shape[1:]))
        raise DataError(
            f"{rows.name}: {request.data.target_column!r} has {shape} numbers in each row, and the target of a "
            "regression is one; choose one of them, or write a script"
        )
    return values[:, 0]


def _matrix(rows: Rows, columns: list[str], request: Request) -> Any:
    """The columns as numbers, of shape (rows, columns), or the one array."""
    import numpy as np

    for column in columns:
        need_column(rows, column, "data.feature_columns", request)
    several = next((name for name in columns if isinstance(rows[0][name], np.ndarray)), None)
    if several is not None:
        return _array(rows, several, columns, request)
    try:
        with np.errstate(over="ignore"):  # said below, with its row
            values = np.array([[float(row[column]) for column in columns] for row in rows], dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        values = None
    if values is None or not np.isfinite(values).all():
        raise _not_a_number(rows, columns, request.data.target_column)
    return values


def _coarse(rows: Rows, columns: list[str]) -> list[str]:
    """A note for each column whose values differ too little for 32 bits, such as times in seconds since 1970."""
    import numpy as np

    notes = []
    for column in columns:
        if isinstance(rows[0][column], np.ndarray):
            continue
        values = np.array([float(row[column]) for row in rows])
        step, deviation = float(np.spacing(np.float32(np.abs(values).max()))), float(values.std())
        if values.min() < values.max() and deviation < FEWEST_STEPS * step:
            notes.append(
                f"{rows.name}: the values of {column!r} differ by about {deviation:.3g}, and 32-bit numbers of their "
                f"size by at least {step:.3g}; subtract {values.min():.6g} from the column to keep them apart"
            )
    return notes


def _array(rows: Rows, name: str, columns: list[str], request: Request) -> Any:
    """One array of an .npz file as numbers."""
    import numpy as np

    if len(columns) > 1:
        raise ArgumentsError(
            f"{request.place('data.feature_columns')}: {rows.name} has the arrays {', '.join(columns)}; name the one "
            f"with the inputs: data.feature_columns=[{name}]"
        )
    shapes = {getattr(row[name], "shape", ()) for row in rows}
    if len(shapes) > 1 or 0 in shapes.pop() or rows[0][name].dtype.kind not in "biuf":
        raise DataError(
            f"{rows.name}: the array {name!r} has {rows[0][name].dtype} of shape {(len(rows), *rows[0][name].shape)}; "
            "the inputs must be at least one real number in each row"
        )
    with np.errstate(over="ignore"):
        values = np.stack([row[name] for row in rows]).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values.reshape(len(rows), -1)).all(axis=1))
    if len(bad):
        raise DataError(f"{rows.row(bad[0])}: {name} has a value that is not a finite number of 32 bits; replace it")
    return values


def _not_a_number(rows: Rows, columns: list[str], target: str) -> DataError:
    for index, row in enumerate(rows):
        for column in columns:
            try:
                good = abs(float(row[column])) <= LARGEST
            except (TypeError, ValueError, OverflowError):
                good = False
            if not good:
                value = f"{rows.row(index)}: {column}={short(row[column])}"
                other = ", or list the other columns in data.feature_columns" if column != target else ""
                return DataError(f"{value} is not a finite number of 32 bits; replace it{other}")
    return DataError(f"{rows.name}: some values are not finite numbers of 32 bits")


def build_regression(request: Request) -> Materials:
    """Model and data of a regression."""
    return _build(request, classes=False)


def build_classification(request: Request) -> Materials:
    """Model and data of a classification of tables."""
    return _build(request, classes=True)


_MODEL = {"name": MLP, "options": {"hidden": [64, 64]}}

REGRESSION = Task(
    name="table-regression",
    help="predict a number from the columns of a table, or from arrays",
    data=TableData,
    metrics={
        "mse": "mean squared error",
        "rmse": "root of the mean squared error",
        "mae": "mean absolute error",
        "r2": "explained part of the variance",
    },
    default_metrics=("rmse", "r2"),
    build=build_regression,
    example={"model": _MODEL, "data": {"train": "train.csv", "validation_share": 0.2, "target_column": "target"}},
)
CLASSIFICATION = Task(
    name="table-classification",
    help="predict a class from the columns of a table, or from arrays",
    data=TableData,
    metrics=CLASS_METRICS,
    default_metrics=("accuracy", "f1"),
    build=build_classification,
    example={"model": _MODEL, "data": {"train": "train.csv", "validation_share": 0.2, "target_column": "label"}},
)
