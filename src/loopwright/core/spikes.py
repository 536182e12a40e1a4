"""Loss spike detection: a loss far above those at the last few log points."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

WINDOW = 8
"""Log points the loss is compared with; a jump can be recognised after half of them."""
FACTOR = 4.0
"""How many times the median of those counts as a jump."""


class SpikeWatch:
    """Remembers the last logged losses and distinguishes a spike from noise."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Whether this logged loss is a jump; one that is not is remembered."""
        enough = len(self._recent) >= WINDOW // 2
        if not math.isfinite(loss) or (enough and loss > FACTOR * median(self._recent)):
            return enough
        self._recent.append(loss)
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = deque(state["recent"], maxlen=WINDOW)
