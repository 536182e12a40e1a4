"""Every error a user can cause, as one tree.

LoopwrightError
 ├─ ArgumentsError (ValueError)        arguments that contradict each other or make no sense, all listed
 │   └─ UnknownArgument (TypeError)    a name that does not exist, with the nearest one that does
 ├─ NotAvailable (NotImplementedError) asked for something loopwright does not do yet, and where to look
 ├─ MissingPackage (ImportError)       an optional package is needed; says what to install
 ├─ DataError (ValueError)             an empty dataset, or samples the model cannot take
 ├─ ModelError (ValueError)            no loss, a loss that is not a scalar, nothing to train
 ├─ OverrideError (TypeError)          a method was overridden that would never be called
 ├─ MetricError (KeyError)             a metric was asked for that evaluation does not produce
 ├─ NonFiniteError (ArithmeticError)   loss or gradients became NaN or infinite and the run was asked to stop
 ├─ CheckpointError (OSError)          a checkpoint is missing, damaged or does not fit the model
 ├─ PeerError (RuntimeError)           another rank of the run failed, with its error
 └─ OutputError (OSError)              the output folder cannot be written
"""

from __future__ import annotations


class LoopwrightError(Exception):
    """Base of every error loopwright raises on purpose."""


class ArgumentsError(LoopwrightError, ValueError):
    """Arguments that contradict each other or make no sense; lists every problem found."""

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


class NotAvailable(LoopwrightError, NotImplementedError):
    """Something loopwright does not do yet."""


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
    """A metric name that evaluation does not produce."""

    def __str__(self) -> str:  # KeyError would show the text in quotes
        return str(self.args[0]) if self.args else ""


class NonFiniteError(LoopwrightError, ArithmeticError):
    """The loss or the gradients became NaN or infinite."""


class CheckpointError(LoopwrightError, OSError):
    """A checkpoint that is missing, damaged or does not fit."""


class OutputError(LoopwrightError, OSError):
    """The output folder cannot be created or written."""


class PeerError(LoopwrightError, RuntimeError):
    """Another rank of this run stopped with an error, so this one stops too."""
