"""Finding the loss in the outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...errors import ModelError
from ..data.columns import innermost


def loss_in(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The loss of a dict, dataclass, tuple (loss first) or scalar."""
    loss = find_loss(outputs)
    if loss is not None:
        return loss
    raise ModelError(
        f"the model returned no loss, only {_described(outputs)}, for the inputs {', '.join(inputs) or 'given'}. "
        "Pass labels it can use, named as an argument of its forward, pass compute_loss_func=, or override compute_loss"
    )


def find_loss(outputs: Any) -> Any:
    """The loss a model returned, or None."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if hasattr(outputs, "loss"):
        return outputs.loss
    if isinstance(outputs, (tuple, list)):
        return outputs[0] if outputs and isinstance(outputs[0], Tensor) else None
    return outputs if isinstance(outputs, Tensor) and outputs.dim() == 0 else None


def _described(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"the keys {', '.join(map(str, outputs))}"
    if isinstance(outputs, Tensor):
        return f"a tensor of shape {tuple(outputs.shape)}"
    return f"a {type(outputs).__name__}"


def decodes_from_labels(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether the model needs the labels to build the decoder's inputs."""
    config = getattr(innermost(model), "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and "decoder_input_ids" not in inputs
