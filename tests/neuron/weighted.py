"""The most common override of `compute_loss`, with class weights; run on the native test device and on real XLA."""

from __future__ import annotations

import torch
from torch import nn

import loopwright


class WeightedLossTrainer(loopwright.NeuronTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):  # type: ignore[no-untyped-def]
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
        loss = loss_fct(logits.view(-1, 3), labels.view(-1))
        return (loss, outputs) if return_outputs else loss
