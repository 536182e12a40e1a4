"""Rows of data files: JSONL, JSON, CSV, TSV, Parquet and text files, folders of them, and datasets of `datasets`."""

from __future__ import annotations

import csv
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...args.field import advised
from ...args.problems import short
from ...errors import ArgumentsError, DataError, MissingPackage, first_line
from ..fields import DataFields
from ..request import Request

Row = dict[str, Any]
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""A surrogate in JSON: two of them are a character."""
LARGEST_FIELD = 2**27
"""Characters of one field of a CSV file; Python's own limit is 131,072."""


class Rows(list[Row]):
    """The rows of a source, with its name for messages."""

    def __init__(
        self,
        rows: Sequence[Row],
        name: str,
        numbers: Sequence[int] | None = None,
        origins: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        super().__init__(rows)
        self.name = name
        self.numbers = range(1, len(rows) + 1) if numbers is None else numbers
        """The number of each row in its source."""
        self.origins = origins
        """The name and the file of each row's source, if there are several."""

    def part(self, indices: Sequence[int]) -> Rows:
        """Some of the rows, in the given order."""
        origins = None if self.origins is None else [self.origins[index] for index in indices]
        return Rows([self[index] for index in indices], self.name, [self.numbers[index] for index in indices], origins)

    def by_source(self) -> dict[str, Rows]:
        """The rows of each source by its name, if there are several."""
        found: dict[tuple[str, str], list[int]] = {}
        for index, origin in enumerate(self.origins or ()):
            found.setdefault(origin, []).append(index)
        parts = {origin: self.part(indices) for origin, indices in found.items()}
        return {name: Rows(part, file, part.numbers) for (name, file), part in parts.items()}

    def file(self, index: int) -> str:
        """The source of a row."""
        return self.name if self.origins is None else self.origins[index][1]

    def row(self, index: int) -> str:
        """A row for messages: the source and its number there."""
        return f"{self.file(index)}: row {self.numbers[index]}"


def each_source(rows: Rows, made: Callable[[Rows], list[Any]]) -> Any:
    """The samples that a function makes of rows; of several sources, those of each by name."""
    return made(rows) if rows.origins is None else {name: made(part) for name, part in rows.by_source().items()}


Read = Callable[[Request, str, str], Rows]
"""Reads a source of a split, `train` or `validation`."""


def read_splits(request: Request, read: Read | None = None) -> tuple[Rows, Rows | None]:
    """The rows to train on and to validate on, the second None if there are none."""
    data: DataFields = request.data
    read = read or read_source
    train = _read_train(request, read)
    held = read(request, "validation", data.validation) if data.validation is not None else None
    if data.validation_share:
        train, held = _held_out(train, data.validation_share, request)
    if data.max_train_samples is not None:
        train = _first_of_each(train, data.max_train_samples)
    if held is not None and data.max_validation_samples is not None:
        held = held.part(range(min(len(held), data.max_validation_samples)))
    return train, held


def _read_train(request: Request, read: Read) -> Rows:
    """The rows of `data.train`; those of several sources one after another."""
    given = request.data.train
    if not isinstance(given, Mapping):
        return read(request, "train", str(given))
    parts = {name: read(request, "train", source) for name, source in given.items()}
    rows = [row for part in parts.values() for row in part]
    numbers = [number for part in parts.values() for number in part.numbers]
    origins = [(name, part.name) for name, part in parts.items() for _ in part]
    return Rows(rows, ", ".join(part.name for part in parts.values()), numbers, origins)


def _first_of_each(rows: Rows, count: int) -> Rows:
    seen: Counter[Any] = Counter()
    kept = []
    for index in range(len(rows)):
        origin = None if rows.origins is None else rows.origins[index]
        seen[origin] += 1
        if seen[origin] <= count:
            kept.append(index)
    return rows.part(kept)


def _held_out(rows: Rows, share: float, request: Request) -> tuple[Rows, Rows]:
    count = max(1, round(len(rows) * share))
    if count >= len(rows):
        raise ArgumentsError(
            f"{request.place('data.validation_share')}={share}: nothing would be left of {len(rows)} rows to train on"
        )
    chosen = set(random.Random(request.seed).sample(range(len(rows)), count))
    rest = [index for index in range(len(rows)) if index not in chosen]
    return rows.part(rest), rows.part(sorted(chosen))


def read_source(request: Request, split: str, source: str) -> Rows:
    """The rows of a source of `data.train` or `data.validation`."""
    place = request.place(f"data.{split}")
    path = Path(source)
    if path.is_file():
        rows = _read_file(path)
    elif path.is_dir():
        rows = _read_folder(path, getattr(request.data, f"{split}_split"), place)
    elif looks_like_path(source):
        raise missing_file(place, source)
    else:
        rows = _from_datasets(request, source, split)
    if not rows:
        raise DataError(f"{place}: {source} has no rows")
    return Rows(rows, source)


def looks_like_path(source: str) -> bool:
    """Whether a source that does not exist was meant as a path."""
    return Path(source).suffix.lower() in READERS or source.startswith((".", "/", "~")) or os.sep * 2 in source


def missing_file(place: str, source: str) -> ArgumentsError:
    """The error for a file that does not exist, with a similar name of its folder."""
    folder = Path(source).parent
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    where = "" if folder.is_dir() else f" (there is no folder {str(folder)!r})"
    problem = f"{place}: there is no file or folder {source!r}{where}"
    more = "paths in a configuration are relative to its folder"
    return ArgumentsError(advised(problem, Path(source).name, names, more))


# ---- files -----------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> list[Row]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ArgumentsError(f"{path}: data files end in {', '.join(READERS)}; convert it to one of these")
    try:
        return list(reader(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _jsonl(path: Path) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line, object_pairs_hook=_pairs)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}:{number}: not JSON ({error}); a line holds one object") from None
                _check_characters(line, row, f"{path}:{number}")
                yield _object(row, f"{path}:{number}")


def _json(path: Path) -> Iterator[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = json.loads(text, object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    if not isinstance(rows, list):
        raise DataError(f"{path}: a JSON file of data is a list of objects, not {type(rows).__name__}")
    _check_characters(text, rows, str(path))
    for number, row in enumerate(rows):
        yield _object(row, f"{path}, item {number}")


def _pairs(pairs: list[tuple[str, Any]]) -> Row:
    """An object of its keys and values; JSON itself would take the last of two equal keys in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there more than once")
    return found


def _check_characters(text: str, value: Any, place: str) -> None:
    """Raise if a text has half of a character, which JSON can write and no tokenizer takes."""
    if HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(f"{place}: {half!r} is half of a character (a surrogate); write the whole one") from None


def _object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f'{place}: {short(row)} is not an object; write each row as {{"column": value}}')
    return row


def _csv(path: Path, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(LARGEST_FIELD)
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            _check_header(reader.fieldnames or (), path, delimiter)
            for row in reader:
                if None in row or None in row.values():
                    names = len(reader.fieldnames or ())
                    raise DataError(
                        f"{path}:{reader.line_num}: not the {names} columns of the header; correct this line, and put "
                        f"texts with {delimiter!r} in quotes"
                    )
                yield row
        except csv.Error as error:
            begins = reader.line_num + 1  # that of the last row that could be read
            raise DataError(f"{path}:{begins}: not CSV ({error}); correct the quotes of this row") from None


def _check_header(names: Sequence[str], path: Path, delimiter: str) -> None:
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}:1: the header has the column {twice!r} more than once; rename or remove one of them")
    other = next((each for each in ";\t|" if each != delimiter and len(names) == 1 and each in names[0]), None)
    if other is not None:
        raise DataError(
            f"{path}:1: the columns are separated by {other!r}; separate them by {delimiter!r}"
            + (", or name the file .tsv" if other == "\t" else "")
        )


def _tsv(path: Path) -> Iterator[Row]:
    return _csv(path, "\t")


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingPackage("pyarrow", needed_for=f"reading {path}") from None
    try:
        yield from parquet.read_table(path).to_pylist()
    except (ValueError, OSError) as error:  # pyarrow's errors of a damaged file
        raise DataError(f"{path}: not Parquet ({first_line(error)})") from None


def _text(path: Path) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig") as file:
        yield from ({"text": line.rstrip("\n")} for line in file if line.strip())


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
    ".txt": _text,
}
"""Readers by the end of a file's name."""


def _read_folder(folder: Path, split: str, place: str) -> list[Row]:
    """All data files of a folder, in the order of their names; or a dataset that `datasets` saved there."""
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        found = _datasets_package(place).load_from_disk(str(folder))
        return _rows_of_dataset(found, split, place)
    visible = (each for each in folder.iterdir() if not each.name.startswith("."))
    files = sorted(each for each in visible if each.suffix.lower() in READERS)
    if not files:
        raise DataError(f"{place}: the folder {folder} has no data file ({', '.join(READERS)})")
    return [row for file in files for row in _read_file(file)]


# ---- datasets --------------------------------------------------------------------------------------------------------


def _datasets_package(place: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingPackage("datasets", needed_for=f"{place}: a dataset by name") from None
    return datasets


def _from_datasets(request: Request, name: str, split: str) -> list[Row]:
    place = request.place(f"data.{split}")
    package = _datasets_package(place)
    wanted = getattr(request.data, f"{split}_split")
    try:
        found = package.load_dataset(name, request.data.subset, split=wanted)
    except Exception as error:  # `datasets` raises errors of many packages; the reason is in the message
        raise DataError(
            f"{place}: {name!r} is neither a file nor a folder here, and `datasets` cannot load its split "
            f"{wanted!r}: {first_line(error)}"
        ) from None
    return _rows_of_dataset(found, wanted, place)


def _rows_of_dataset(found: Any, split: str, place: str) -> list[Row]:
    if hasattr(found, "keys"):  # a DatasetDict
        if split not in found:
            raise ArgumentsError(f"{place}: the dataset has no split {split!r}; it has {', '.join(found)}")
        found = found[split]
    return [{**row, **_with_names(row, names)} for row in found] if (names := _class_names(found)) else list(found)


def _class_names(found: Any) -> dict[str, list[str]]:
    """The names of the classes of each column that has some: `datasets` stores their numbers."""
    columns = {name: getattr(kind, "feature", kind) for name, kind in (getattr(found, "features", None) or {}).items()}
    return {name: list(kind.names) for name, kind in columns.items() if type(kind).__name__ == "ClassLabel"}


def _with_names(row: Row, names: Mapping[str, list[str]]) -> Row:
    """The columns of classes, or of lists of them, with names for numbers."""

    def named(column: str, value: Any) -> Any:
        if isinstance(value, list):
            return [named(column, each) for each in value]
        return names[column][value] if isinstance(value, int) and 0 <= value < len(names[column]) else value

    return {column: named(column, row[column]) for column in names}


# ---- columns ---------------------------------------------------------------------------------------------------------


def need_column(rows: Rows, column: str, key: str, request: Request) -> None:
    """Raise unless every row has this column, which the configuration names under `key`."""
    missing = next((index for index, row in enumerate(rows) if column not in row), None)
    if missing is None:
        return
    names = list(dict.fromkeys(name for row in rows[:100] for name in row))
    if column in names:
        raise DataError(f"{rows.row(missing)} has no column {column!r}; add it, or remove the row")
    problem = f"{request.place(key)}={column!r}: {rows.name} has no such column"
    raise ArgumentsError(advised(problem, column, names, f"it has {', '.join(names)}"))


def need_text(rows: Rows, column: str, key: str, request: Request) -> None:
    """Raise unless every row has text in this column."""
    need_column(rows, column, key, request)
    for index, row in enumerate(rows):
        if not isinstance(row[column], str):
            raise DataError(f"{rows.row(index)}: {column}={short(row[column])} is not text")


def need_tokens(rows: Rows, samples: Sequence[Row], column: str, key: str = "input_ids") -> None:
    """Raise unless the tokenizer made tokens of this column in every row; `key` is their name in a sample."""
    empty = next((index for index, sample in enumerate(samples) if not len(sample[key])), None)
    if empty is not None:
        raise DataError(
            f"{rows.row(empty)}: the tokenizer makes no token of {column}={short(rows[empty][column])}; remove the row"
        )
