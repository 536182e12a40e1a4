"""Loss spike detection: a loss far above those at the last few log points."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from ..checkpoint.schema import list_of, number, record

SAVED_SPIKES = record({"recent": list_of(number())})
WINDOW = 8
"""Log points the loss is compared with; a spike can be detected after half of them."""
FACTOR = 4.0
"""Multiple of their median above which a loss is a spike."""


class SpikeWatch:
    """Keeps the last logged losses and distinguishes a spike from noise."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Whether this logged loss is a spike; if not, it is added to the window."""
        enough = len(self._recent) >= WINDOW // 2
        if not math.isfinite(loss) or (enough and loss > FACTOR * median(self._recent)):
            return enough
        self._recent.append(loss)
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = deque(state["recent"], maxlen=WINDOW)
