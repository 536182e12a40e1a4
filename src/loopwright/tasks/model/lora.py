"""Adapters through PEFT: LoRA, DoRA and, with 4-bit weights, QLoRA."""

from __future__ import annotations

from copy import copy
from typing import Any

from ...args.field import nearest
from ...errors import ArgumentsError, MissingPackage, first_line
from ..fields import LoraFields
from ..request import Request

KINDS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}
"""PEFT's name of a task: with it, PEFT trains and saves a new head in full."""
LONGEST = 200
"""Characters of a list of modules in a message."""
HEADS = {"AutoModelForImageClassification": ("classifier",), "AutoModelForCTC": ("lm_head",)}
"""Names of new heads for which PEFT has no task."""


def _check_saved(fields: LoraFields, present: set[str], request: Request) -> None:
    """Raise if a module that is to be trained in full does not exist: PEFT would leave it out in silence."""
    for name in fields.modules_to_save or ():
        if name.rpartition(".")[2] not in present:
            named = ", ".join(sorted(present - {""}))
            raise ArgumentsError(
                f"{request.place('lora.modules_to_save')}: the model has no module {name!r}"
                f"{nearest(name, present)}; it has {named[:LONGEST]}"
            )


def with_adapter(model: Any, fields: LoraFields, request: Request, auto: str) -> Any:
    """The model with a new adapter; the adapter and a new head are trained and saved, nothing else."""
    try:
        import peft
    except ImportError:
        raise MissingPackage("peft", needed_for="the block 'lora'") from None
    if fields.quantization is not None:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    _check_saved(fields, present, request)
    heads = [name for name in HEADS.get(auto, ()) if name in present]
    options = peft.LoraConfig(
        task_type=KINDS.get(auto),
        r=fields.r,
        lora_alpha=fields.alpha,
        lora_dropout=fields.dropout,
        # PEFT adds names to the lists it is given, and these are the user's.
        target_modules=copy(fields.target_modules),
        modules_to_save=copy(fields.modules_to_save) or heads or None,
        bias=fields.bias,
        use_dora=fields.dora,
        use_rslora=fields.rslora,
    )
    try:
        return peft.get_peft_model(model, options)
    except ValueError as error:
        named = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "weight")})
        reason = first_line(error).rstrip(".")
        raise ArgumentsError(
            f"{request.place('lora.target_modules')}: {reason}; this model has {', '.join(named[:12])}"
        ) from None
