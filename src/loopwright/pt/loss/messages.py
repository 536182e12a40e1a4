"""Warnings about losses: the finding, its consequence, and a remedy."""

from __future__ import annotations

COUPLED = (
    "the loss of a batch is neither the mean nor the sum over its parts (class weights, several means, contrastive "
    "terms, BatchNorm): the step depends on its split into micro-batches, weighted by {}. Return (sum, count) from "
    "compute_loss, or use one micro-batch per step (gradient_accumulation_steps=1, one rank)"
)
COUNTS_PADDING = (
    "the loss of a batch changes with its padding, so the step depends on how samples are grouped into "
    "micro-batches. Exclude padding from the loss, or pad all micro-batches to one length"
)
WITHOUT_ITEMS = (
    "a micro-batch whose labels are all -100 has a nonzero loss, so the loss is not a mean over label tokens; from "
    "now on micro-batches are weighted by their samples"
)
IS_A_SUM = (
    "the loss is a sum over its batch, so the sums of a step's micro-batches are added and the step does not "
    "depend on how it is split. Return the mean if you want the average of micro-batches"
)

IS_DIVIDED = (
    "the loss is already divided by gradient_accumulation_steps and is multiplied by it here, since micro-batches "
    "are weighted by the trainer; remove the division"
)
HAS_CHANGED = (
    "the loss is divided by {}, but by {} when it was last tested, so steps in between may be weighted wrongly. From "
    "now on it is tested more often; return (sum, count) from compute_loss to be exact"
)
MAY_BE_EITHER = (
    "the loss may be the mean over {} or over {}, and no step distinguishes them; the first is assumed. Return "
    "(sum, count) from compute_loss to be exact"
)
