"""Every error a user can cause, as one tree.

LoopwrightError
 ├─ ArgumentsError (ValueError)        invalid or contradictory arguments, all listed
 │   ├─ UnknownArgument (TypeError)    a name that does not exist, with the nearest one that does
 │   └─ RanksDisagree                  ranks of a run that differ in arguments, versions, code, data or model
 ├─ NotAvailable (NotImplementedError) a feature that is not available yet
 ├─ MissingPackage (ImportError)       an optional package is needed, with the install command
 ├─ DataError (ValueError)             an empty dataset, or samples that the model does not accept
 ├─ ModelError (ValueError)            no loss, a loss that is not a scalar, nothing to train
 ├─ OverrideError (TypeError)          a method was overridden that would never be called
 ├─ MetricError (KeyError)             a requested metric that evaluation does not return
 ├─ NonFiniteError (ArithmeticError)   loss or gradients became NaN or infinite, with on_nonfinite='raise'
 ├─ CheckpointError (OSError)          a checkpoint is missing, damaged or does not match the model
 ├─ LogError (TypeError)               a value that cannot be written to a log or a file
 ├─ BusyError (RuntimeError)           train() while the same trainer is training
 ├─ HubError (RuntimeError)            a push to the Hub failed, or a pushed checkpoint cannot be downloaded
 ├─ OwnerError (RuntimeError)          the output folder is used by another run, or was taken over by one
 ├─ PeerError (RuntimeError)           another rank of the run failed, with its error
 │   └─ LostRankError                  another rank was killed, or its machine cannot be reached
 ├─ SearchError (RuntimeError)         a hyper-parameter search, or the process of one of its trials, failed
 └─ OutputError (OSError)              the output folder cannot be written
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class LoopwrightError(Exception):
    """Base class of every error that loopwright raises."""


class ArgumentsError(LoopwrightError, ValueError):
    """Invalid or contradictory arguments; lists every problem found."""

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems with the arguments:{lines}"


class UnknownArgument(ArgumentsError, TypeError):
    """An argument name that does not exist."""


class RanksDisagree(ArgumentsError):
    """The ranks of a run differ in something that all must have in common; raised on every rank."""

    def _text(self) -> str:
        listed = "; ".join(self.problems[:10])
        more = f"; and {len(self.problems) - 10} more differences" if len(self.problems) > 10 else ""
        return (
            f"the ranks disagree: {listed}{more}. Start all ranks with the same arguments, code, packages and data, "
            "and change settings on all of them at once"
        )


class NotAvailable(LoopwrightError, NotImplementedError):
    """A feature that is not available yet."""


class MissingPackage(LoopwrightError, ImportError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, *, needed_for: str, install: str | None = None) -> None:
        self.package = package
        super().__init__(
            f"{needed_for} needs the package '{package}', which is not installed. "
            f"Install it with: pip install {install or package}"
        )


class DataError(LoopwrightError, ValueError):
    """A dataset that cannot be trained on or evaluated."""


class ModelError(LoopwrightError, ValueError):
    """A model or a loss that cannot be trained."""


class OverrideError(LoopwrightError, TypeError):
    """An overridden method that would never be called."""


class MetricError(LoopwrightError, KeyError):
    """A metric name that evaluation does not return."""

    def __str__(self) -> str:  # KeyError would show the text in quotes
        return str(self.args[0]) if self.args else ""


class LogError(LoopwrightError, TypeError):
    """A value in a log, a metric or the state of a callback that cannot be written to a file."""


class BusyError(LoopwrightError, RuntimeError):
    """A call of `train()` while the same trainer is training."""


class NonFiniteError(LoopwrightError, ArithmeticError):
    """The loss or the gradients became NaN or infinite."""


class CheckpointError(LoopwrightError, OSError):
    """A checkpoint that is missing, damaged or does not match the model."""


class OutputError(LoopwrightError, OSError):
    """The output folder cannot be created or written."""


class HubError(LoopwrightError, RuntimeError):
    """A push to the Hub that failed, or a pushed checkpoint that cannot be downloaded."""


class OwnerError(LoopwrightError, RuntimeError):
    """The output folder is used by another run, or was taken over by one."""


class SearchError(LoopwrightError, RuntimeError):
    """A hyper-parameter search, or the process of one of its trials, failed."""


class PeerError(LoopwrightError, RuntimeError):
    """Another rank of this run stopped with an error, so this one stops too."""


class LostRankError(PeerError):
    """Another rank of this run was killed, or its machine cannot be reached."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def some(names: Iterable[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
