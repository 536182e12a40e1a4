"""What users are told about their losses, once: what was found, what follows, what to do."""

from __future__ import annotations

COUPLED = (
    "the loss of a batch is neither the mean nor the sum of the losses of its parts (class weights, several means in "
    "one, samples that are compared with each other, BatchNorm): the update depends on how it is cut into "
    "micro-batches, which are weighed by {}. Return (sum, count) from compute_loss where there is such a pair, or make "
    "each update one micro-batch (gradient_accumulation_steps=1, one process)"
)
COUNTS_PADDING = (
    "the loss of a batch changes with its padding: the update depends on which samples are in a micro-batch together. "
    "Leave padding out of the loss, or have all micro-batches padded to one length"
)
WITHOUT_ITEMS = (
    "a micro-batch whose labels all are -100 has a loss that is not zero, so the loss is no mean over label tokens: "
    "from here on micro-batches are weighed by their samples"
)
IS_A_SUM = (
    "the loss is a sum over its batch: the sums of an update's micro-batches are added up, so that the update does not "
    "depend on how it is cut; return the mean if the average of micro-batches is wanted"
)

IS_DIVIDED = (
    "the loss is already divided by gradient_accumulation_steps: it is taken times that number, since micro-batches "
    "are weighed here; leave the division out"
)
MAY_BE_EITHER = (
    "the loss may be the mean over {} or over {}, and no update has told: it is taken for the first; return (sum, "
    "count) from compute_loss to be exact"
)
