"""Which sample, or which samples in the collator, raised an error while a batch was loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from ...core.user_code.error_notes import BEGINNING, add_note, describe, describe_items, frames_of, is_clear
from ...errors import LoopwrightError
from .columns import LABEL_COLUMNS


def add_note_of_loading(error: Exception, what: str, when: str) -> None:
    """A note about an error raised by a loader: the sample or the collator, and what it was given."""
    if isinstance(error, LoopwrightError):
        _keep_own_message(error)
    if is_clear(error):
        return
    line = _line_of_worker(error)
    if line is not None:
        error.add_note(f"{line}; {when}")
        return
    part, given, advice = _part_in_this_process(error, what)
    add_note(error, part, when=when, given=given, advice=advice)


def _keep_own_message(error: Exception) -> None:
    """Take the message of an error of loopwright out of the text with a traceback that torch made of it in a worker."""
    text = str(error.args[0]) if error.args else ""
    _, found, own = text.rpartition(f"{type(error).__name__}: ")
    if found and text.startswith("Caught ") and own.strip():
        error.args = (own.strip().splitlines()[0],)


def take(batches: Iterator[Any], count: int) -> list[Any]:
    """The next batches, fewer at the end of the data; a StopIteration of the user's code is not that end."""
    found = []
    try:
        for _ in range(count):
            found.append(next(batches))
    except StopIteration as end:
        _refuse_stop(end)
    return found


def each_of(loader: Any) -> Iterator[Any]:
    """All batches of a loader; a StopIteration of the user's code is not their end."""
    batches = iter(loader)
    while found := take(batches, 1):
        yield found[0]


def _refuse_stop(end: StopIteration) -> None:
    """Raise an error if a dataset or collator raised this: a loop would take it for the end of the data."""
    is_from_worker = str(end).startswith("Caught StopIteration in DataLoader worker")
    if is_from_worker or _is_below_fetch(end.__traceback__):
        text = str(end) if is_from_worker else f"StopIteration: {end}"
        raise RuntimeError(text).with_traceback(end.__traceback__) from end


def _is_below_fetch(trace: TracebackType | None) -> bool:
    """Whether a StopIteration comes from a dataset or collator that torch's `fetch` has called, and is not its own."""
    while trace is not None:
        fetcher = trace.tb_frame.f_locals.get("self") if trace.tb_frame.f_code.co_name == "fetch" else None
        if isinstance(fetcher, _MapDatasetFetcher) or (
            isinstance(fetcher, _IterableDatasetFetcher) and fetcher.auto_collation
        ):
            return trace.tb_next is not None
        trace = trace.tb_next
    return False


def _part_in_this_process(error: Exception, what: str) -> tuple[str, str, str]:
    """The part that was running, by the frame of torch's loader: no sample pays for being found."""
    for frame in frames_of(error):
        fetcher = frame.f_locals.get("self")
        if frame.f_code.co_name != "fetch" or not isinstance(fetcher, (_MapDatasetFetcher, _IterableDatasetFetcher)):
            continue
        asked: Any = frame.f_locals.get("possibly_batched_index")
        data = frame.f_locals.get("data")
        if isinstance(fetcher, _IterableDatasetFetcher):
            if data is None or not (fetcher.ended or len(data) == len(asked)):
                return f"the {what} dataset, in sample {len(data or ())} of a batch,", "", ""
            return "the data collator", describe(data), text_in(data)
        if data is not None:
            return f"the data collator on items {describe_items(asked)}", describe(data), text_in(data)
        return _part_of_items(error, what, asked)
    return f"the loader of the {what} data", "", ""


def text_in(samples: Any) -> str:
    """What to do if a column that the collator was given is text; labels first, because other text may be removed."""
    first = samples[0] if isinstance(samples, list) and samples else None
    names = [name for name, value in first.items() if isinstance(value, str)] if isinstance(first, Mapping) else []
    if not names:
        return ""
    names.sort(key=lambda name: name not in LABEL_COLUMNS)
    is_label = names[0] in LABEL_COLUMNS
    advice = "map each text to an integer from 0" if is_label else "tokenize or remove the column"
    return f"the column {names[0]!r} holds text, which is not a number: {advice}"


def _part_of_items(error: Exception, what: str, asked: Any) -> tuple[str, str, str]:
    for frame in frames_of(error):
        if frame.f_code.co_filename.endswith("fetch.py") and "idx" in frame.f_locals:
            item = frame.f_locals["idx"]
            return f"item {item} of the {what} dataset", "", f"try dataset[{item}] alone"
    return f"items {describe_items(list(asked))} of the {what} dataset", "", ""


def _line_of_worker(error: Exception) -> str | None:
    """Take the note of a loader's worker out of the text that torch made of its error."""
    text = str(error.args[0]) if error.args else ""
    line = next((each for each in text.splitlines() if each.startswith(BEGINNING)), None)
    if line is not None:
        with suppress(TypeError, AttributeError):
            error.args = (type(error.args[0])(text.replace(f"{line}\n", "")), *error.args[1:])
    return line


def raise_for_main(error: Exception) -> NoReturn:
    """Raise an error in a worker; one whose class the main process cannot import is raised as a RuntimeError.

    torch sends the class by its name. If that fails, it sends nothing, and the main process waits for ever.
    """
    found: Any = sys.modules.get(type(error).__module__)
    for name in type(error).__qualname__.split("."):
        found = getattr(found, name, None)
    if found is type(error) and not isinstance(error, StopIteration):  # which torch takes for the end of a stream
        raise error
    sent = RuntimeError(f"{type(error).__qualname__}: {error}")
    for note in getattr(error, "__notes__", ()):
        sent.add_note(note)
    raise sent from error


class NotedSamples:
    """The samples of a stream in a worker of a loader."""

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples, self._count = samples, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            raise
        except Exception as error:  # the stream is the user's; re-raised with a note
            add_note(error, f"sample {self._count} of the dataset's stream in a worker")
            raise_for_main(error)
        self._count += 1
        return sample


class NotedInWorker:
    """A collator in a worker of a loader, whose errors name the samples: only text of them reaches the main process."""

    def __init__(self, collate: Callable[[Any], Any], loaded: Callable[[], list[int]] | None) -> None:
        self.collate, self._loaded = collate, loaded
        self.shapes = getattr(collate, "shapes", None)

    def __call__(self, samples: Any) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:  # the collator is the user's; the error is re-raised with a note
            items = "" if self._loaded is None else f" on items {describe_items(self._loaded())}"
            part = f"the data collator{items} in a worker"
            add_note(error, part, given=describe(samples), advice=text_in(samples))
            raise_for_main(error)
