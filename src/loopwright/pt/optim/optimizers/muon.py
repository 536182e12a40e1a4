"""Muon for the hidden matrices of a model and AdamW for everything else, as one optimizer.

Muon (Jordan and others, 2024) replaces the momentum of a matrix by the nearest matrix whose singular values are about
equal, found by a few Newton-Schulz iterations. It applies to the matrices inside a network; embeddings, the output
head, norms, biases and all parameters that are not matrices are updated by AdamW. With `adjust_lr="match_rms_adamw"`
(Liu and others, arXiv:2502.16982) an update has the size AdamW's would have, so that one learning rate serves both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from ....errors import ArgumentsError
from .decay import NORM_CLASS
from .targets import is_all_linear, is_target

Group = dict[str, Any]

# Coefficients of the quintic iteration, chosen by Muon's authors to increase small singular values quickly.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
BATCH_ELEMENTS = 2**26  # matrices of one shape are iterated together, up to this many elements at once

# Matched against the last two elements of a name only: a whole model may be under `embedder`.
EMBEDDING_NAME = re.compile(r"embed|(?:^|\.)(?:wte|wpe|shared|relative_attention_bias)(?:\.|$)")
HEAD_NAME = re.compile(r"(?:^|\.)(?:lm_head|heads?|classifier|score|qa_outputs|cls|logits|output_layer)(?:\.|$)")


def _matched_to_adamw(rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns))


def _as_published(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, rows / columns))


ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": _matched_to_adamw,
    "original": _as_published,
}


class Muon(Optimizer):
    """Updates groups with `algorithm="muon"` by Muon and all others by AdamW."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if adjust_lr not in ADJUSTMENTS:
            raise ArgumentsError(f"Muon: adjust_lr must be one of {', '.join(ADJUSTMENTS)}, got {adjust_lr!r}.")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "algorithm": "adamw",
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; Muon groups accept only matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        shapes = [tuple(p.shape) for p in group["params"] if p.ndim != 2]
        if group["algorithm"] == "muon" and shapes:
            raise ArgumentsError(f"Muon updates matrices; a parameter of shape {shapes[0]} belongs to an AdamW group.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["algorithm"] == "muon":
                self._muon(parameters, group)
            elif parameters:
                self._adamw(parameters, group)
        return loss

    def _muon(self, parameters: list[Tensor], group: Group) -> None:
        for batch in _batches_of_one_shape(parameters):
            directions = torch.stack([self._direction(p, group) for p in batch])
            updates = orthogonalize(directions, steps=group["ns_steps"]).to(batch[0].dtype)
            updates.mul_(group["lr"] * ADJUSTMENTS[group["adjust_lr"]](*batch[0].shape))
            for parameter, update in zip(batch, updates, strict=True):
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update)

    def _direction(self, parameter: Tensor, group: Group) -> Tensor:
        """The momentum including the new gradient; with nesterov, one step ahead."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
        return parameter.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _adamw(self, parameters: list[Tensor], group: Group) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(
                    step=torch.zeros((), dtype=torch.float32),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalize(matrices: Tensor, *, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Matrices (the last two dimensions) with the same singular vectors and singular values near one."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    # bfloat16 is sufficient for the iteration, and fast on accelerators; on a CPU it is slow.
    x = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    x = x.mT if is_tall else x  # the smaller side gives the smaller product
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x


def _batches_of_one_shape(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of parameters with one shape, dtype and device, limited to BATCH_ELEMENTS elements."""
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.shape, parameter.dtype, parameter.device), []).append(parameter)
    for same in alike.values():
        size = max(1, BATCH_ELEMENTS // max(1, same[0].numel()))
        for start in range(0, len(same), size):
            yield same[start : start + size]


# ------------------------------------------------------------------------------------------------ which parameters


def muon_groups(groups: list[Group], model: nn.Module, targets: Any = None, **adamw_options: Any) -> list[Group]:
    """Split parameter groups into those for Muon and those for AdamW; the latter get `adamw_options`."""
    hidden = {id(parameter) for parameter in hidden_matrices(model, targets).values()}
    split: list[Group] = []
    for algorithm, extra in (("muon", {}), ("adamw", adamw_options)):
        for group in groups:
            chosen = [p for p in group["params"] if (id(p) in hidden) == (algorithm == "muon")]
            if chosen:
                split.append({**group, **extra, "params": chosen, "algorithm": algorithm})
    return split


def hidden_matrices(model: nn.Module, targets: Any = None) -> dict[str, nn.Parameter]:
    """The trainable matrices without embeddings, output head and norms; `targets` restricts them further."""
    outer = _outer_parameters(model)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and parameter.requires_grad and id(parameter) not in outer
        if _is_meant(name.rpartition(".")[0], targets)
    }


def _is_meant(path: str, targets: Any) -> bool:
    if targets is None or is_all_linear(targets):
        return True
    return is_target(path, targets if isinstance(targets, str) else list(targets))


def _outer_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters of embeddings, norms and the output head, including weights tied to them."""
    outer = {id(parameter) for parameter in _head_parameters(model)}
    for path, module in model.named_modules(remove_duplicate=False):
        is_outer = isinstance(module, nn.Embedding | nn.EmbeddingBag) or NORM_CLASS.search(type(module).__name__)
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}".lower()
            tail = ".".join(full.split(".")[-2:])
            if is_outer or name.endswith("bias") or EMBEDDING_NAME.search(tail) or HEAD_NAME.search(full):
                outer.add(id(parameter))
    return outer


def _head_parameters(model: nn.Module) -> Collection[nn.Parameter]:
    """Parameters of the output layer: the declared one, none if one matches by name, else the last linear layer."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    if isinstance(head, nn.Module):
        return list(head.parameters())
    if any(HEAD_NAME.search(name.lower()) for name, _ in model.named_parameters()):
        return []  # matched by name
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return list(layers[-1].parameters()) if layers else []
