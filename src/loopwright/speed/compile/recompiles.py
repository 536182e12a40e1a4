"""Counting recompilations and their reasons: each takes seconds, and beyond a limit torch runs eagerly."""

from __future__ import annotations

from collections import deque
from typing import Any

from ...notices import Notices

KEPT = 8
"""Number of reasons to keep, the latest ones."""


class RecompileCounter:
    """Number of compilations in this run, how many of them were recompilations, and the last reasons."""

    def __init__(self, notices: Notices, *, allowed: int | None = None) -> None:
        self.compilations = self.count = 0
        self.reasons: deque[str] = deque(maxlen=KEPT)
        self.pending: list[str] = []
        """Warnings to emit later, because they must not be raised inside torch's compiler."""
        self._notices, self._allowed = notices, allowed
        self._frames: set[str] = set()
        self._failures: dict[Any, int] = {}
        self._told_limit = False

    def start(self) -> None:
        """Start counting."""
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import guard_failures

        self._failures = {code: len(reasons) for code, reasons in guard_failures.items()}
        if self._compiled not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(self._compiled)

    def stop(self) -> None:
        """Stop counting."""
        from torch._dynamo.callback import callback_handler

        if self._compiled in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(self._compiled)

    def tell(self) -> None:
        """Emit the pending warnings, each once; an error in strict mode."""
        pending, self.pending = self.pending, []
        for text in pending:
            self._notices.warn_once(text)

    def figures(self) -> dict[str, Any]:
        """The counts and the last reasons, for a report."""
        return {"compilations": self.compilations, "recompilations": self.count, "reasons": list(self.reasons)}

    def _compiled(self, event: Any) -> None:
        """Torch has compiled code; `event.compile_id` identifies it and how often it had been compiled before."""
        if event.callback_trigger.name != "DYNAMO":
            return  # a backward pass or a CUDA graph capture of a compilation already counted
        code, _, before = event.compile_id.rpartition("/")
        self.compilations += 1
        name, reason = self._latest_failure()
        if code in self._frames:
            self.count += 1
            self.reasons.append(f"{name}: {reason}")
            self._mind_the_allowance()
        self._frames.add(code)
        if before.isdigit():
            self._mind_the_limit(name, int(before) + 1, reason)

    def _mind_the_allowance(self) -> None:
        if self._allowed is not None and self.count == self._allowed + 1:
            self.pending.append(
                f"torch_compile: recompiled {self.count} time{'s' * (self.count > 1)}, more than "
                f"max_recompiles={self._allowed}; the last time because of {self.reasons[-1]}"
            )

    def _mind_the_limit(self, name: str, variants: int, reason: str) -> None:
        import torch._dynamo

        if variants >= torch._dynamo.config.recompile_limit and not self._told_limit:
            self._told_limit = True
            self.pending.append(
                f"torch_compile: {name} has {variants} compiled variants, which is torch's limit; further ones run "
                f"eagerly. The last one was compiled because of {reason}"
            )

    def _latest_failure(self) -> tuple[str, str]:
        """The function that was compiled again, and the failed guard of its newest variant."""
        from torch._dynamo.utils import guard_failures

        found = ("a function", "an unknown reason")
        for code, reasons in guard_failures.items():
            known = self._failures.get(code, 0)
            if len(reasons) > known:
                self._failures[code] = len(reasons)
                found = (getattr(code, "co_qualname", code.co_name), plain_reason(reasons[known]))
        return found


def plain_reason(text: str) -> str:
    """Torch's reason in one line, without the number of the variant and the source location."""
    head, _, rest = text.partition(": ")
    body = rest if "/" in head and rest else text
    return " ".join(body.split("#")[0].split()).rstrip(". ") or " ".join(body.split())
