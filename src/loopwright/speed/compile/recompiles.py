"""Counting how often torch compiles again, and why: each time costs seconds, and beyond a limit torch gives up."""

from __future__ import annotations

from collections import deque
from typing import Any

from ...notices import Notices

KEPT = 8
"""Reasons that are kept; the last ones say most."""


class RecompileCounter:
    """How many compilations this run made, how many of them were of code already compiled, and the last reasons."""

    def __init__(self, notices: Notices, *, allowed: int | None = None) -> None:
        self.compilations = self.count = 0
        self.reasons: deque[str] = deque(maxlen=KEPT)
        self.pending: list[str] = []
        """What is to be said; it waits, because torch's compiler is no place to raise from."""
        self._notices, self._allowed = notices, allowed
        self._frames: set[str] = set()
        self._failures: dict[Any, int] = {}
        self._told_limit = False

    def start(self) -> None:
        """Count from here."""
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import guard_failures

        self._failures = {code: len(reasons) for code, reasons in guard_failures.items()}
        if self._compiled not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(self._compiled)

    def stop(self) -> None:
        """Count no further."""
        from torch._dynamo.callback import callback_handler

        if self._compiled in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(self._compiled)

    def tell(self) -> None:
        """Say what is to be said, once; an error when the run is strict."""
        pending, self.pending = self.pending, []
        for text in pending:
            self._notices.warn_once(text)

    def figures(self) -> dict[str, Any]:
        """The counts and the last reasons, for a report."""
        return {"compilations": self.compilations, "recompilations": self.count, "reasons": list(self.reasons)}

    def _compiled(self, event: Any) -> None:
        """Torch has compiled something; `event.compile_id` is which code, and how often it had been compiled before."""
        if event.callback_trigger.name != "DYNAMO":
            return  # a backward pass or a recording that belongs to a compilation already counted
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
        """The code that was compiled again and the check of its newest variant that failed."""
        from torch._dynamo.utils import guard_failures

        found = ("a function", "an unknown reason")
        for code, reasons in guard_failures.items():
            known = self._failures.get(code, 0)
            if len(reasons) > known:
                self._failures[code] = len(reasons)
                found = (getattr(code, "co_qualname", code.co_name), plain_reason(reasons[known]))
        return found


def plain_reason(text: str) -> str:
    """Torch's reason in one line: without the number of the variant and the source it points to."""
    head, _, rest = text.partition(": ")
    body = rest if "/" in head and rest else text
    return " ".join(body.split("#")[0].split()).rstrip(". ") or " ".join(body.split())
