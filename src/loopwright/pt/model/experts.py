"""A notice about mixture-of-experts models whose router loss is not part of the loss."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..data.columns import innermost

ROUTER = re.compile(r"(?:^|[._])(?:router|gate)(?:[._]|$)")


def report_router_loss(model: Any, tell: Callable[[str], None]) -> None:
    """Report that the loss of a model with experts does not balance them, if its router is trained."""
    own = innermost(model)
    config = getattr(own, "config", None)
    if config is None:
        return
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    holder = next((each for each in (config, text) if hasattr(each, "output_router_logits")), None)
    experts = max(_number(text, "num_experts"), _number(text, "num_local_experts"), _number(text, "n_routed_experts"))
    if holder is None or experts < 2 or not _trains_router(own):
        return
    path = "model.config" if holder is config else "model.config.get_text_config()"
    coefficient = getattr(holder, "router_aux_loss_coef", None)
    if not holder.output_router_logits:
        tell(
            f"{type(own).__name__} has {experts} experts and trains its router, but without the router loss that "
            f"balances them; set {path}.output_router_logits=True (router_aux_loss_coef is {coefficient})"
        )
    elif coefficient == 0:
        tell(
            f"{type(own).__name__} has {experts} experts and trains its router, but {path}.router_aux_loss_coef=0 "
            "leaves out the loss that balances them; set it, for example to 0.001"
        )


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _trains_router(model: Any) -> bool:
    """Whether a parameter of a router is trained; True if none is found by its name."""
    found = [parameter for name, parameter in model.named_parameters() if ROUTER.search(name)]
    return not found or any(parameter.requires_grad for parameter in found)
