"""Values outside the kept tokens, and tensors whose rows are not samples, or only in some batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cases import case
from .models import SIZES, WIDTH, Around, Pooled, changing, classes, llama, made, own_loss, summed, tokens
from .reference import as_written, by_samples, pooled

CAUSE = "R4"
IMAGE = 4


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_samples(batch: dict[str, Tensor], *shape: int) -> Tensor:
    """Numbers that belong to a sample, whatever batch it is in."""
    return torch.stack([numbers(*shape, seed=int(row.sum())) for row in batch["input_ids"]])


def of_places(batch: dict[str, Tensor]) -> Tensor:
    """Numbers for every place of the padded batch."""
    return of_samples(batch, 64)[:, : batch["input_ids"].shape[1]].contiguous()


# ---- images ---------------------------------------------------------------------------------------------------------


class Seeing(Around):
    """Adds what it sees to every token of a sample, if there is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3 * IMAGE * IMAGE, WIDTH).double()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        labels: Any = None,
        position_ids: Any = None,
        pixel_values: Any = None,
    ) -> Any:
        self.seen = None if pixel_values is None else self.tower(pixel_values.flatten(1))
        return super().forward(input_ids, attention_mask, labels, position_ids)

    def embedded(self, hidden: Tensor, mask: Any) -> Tensor:
        return hidden if self.seen is None else hidden + self.seen.unsqueeze(1)


def images_later(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    if not update:
        return batch
    return {**batch, "pixel_values": of_samples(batch, 3, IMAGE, IMAGE)}


def images_now_and_then(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    return images_later(batch, update % 2)


case("images that come later", CAUSE, lambda: made(Seeing), pooled(tokens), collator=changing(images_later))
case("images now and then", CAUSE, lambda: made(Seeing), pooled(tokens), collator=changing(images_now_and_then))


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=IMAGE,
        patch_size=2, projection_dim=WIDTH,
    )  # fmt: skip
    text = {**SIZES, "model_type": "llama", "vocab_size": 40}
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=39, vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    return made(LlavaForConditionalGeneration, config)


PATCHES = 4


def with_images(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    """Text at first; later every second sample begins with an image, in tokens of its own."""
    text = batch["input_ids"].masked_fill(batch["input_ids"] == 39, 5)
    batch = {**batch, "input_ids": text, "labels": batch["labels"].masked_fill(batch["labels"] == 39, 5)}
    if not update:
        return batch
    shown = torch.arange(len(text)) % 2 == 0 if update % 2 else torch.ones(len(text), dtype=torch.bool)
    mask = batch["attention_mask"]
    front = {
        "input_ids": torch.where(shown[:, None], 39, 4).expand(-1, PATCHES),
        "attention_mask": torch.ones(len(text), PATCHES, dtype=mask.dtype),
        "labels": torch.full((len(text), PATCHES), -100),
    }
    made = {name: torch.cat([front[name], value], dim=1) for name, value in batch.items()}
    return {**made, "pixel_values": of_samples(batch, 3, IMAGE, IMAGE)[shown]}


def llava_tokens(owner: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    labels = batch.pop("labels")
    return summed(model(**batch).logits, labels)


case("llava with text at first", CAUSE, llava, pooled(llava_tokens), collator=changing(with_images))
case("llava with images at once", CAUSE, llava, pooled(llava_tokens),
     collator=changing(lambda batch, update: with_images(batch, update + 1)))  # fmt: skip


# ---- weights of samples ---------------------------------------------------------------------------------------------


class Weighted(Around):
    """Weighs its tokens by the weight of their sample, if there is one."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        labels: Any = None,
        position_ids: Any = None,
        sample_weight: Any = None,
    ) -> Any:
        found = super().forward(input_ids, attention_mask, None, position_ids)
        if labels is not None:
            total, count = weighted_sum(found["logits"], labels, sample_weight)
            found["loss"] = total / count
        return found


def weighted_sum(logits: Tensor, labels: Tensor, weight: Any) -> tuple[Tensor, Tensor]:
    logits, labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    if weight is not None:
        each = each * weight.unsqueeze(1)
    return each.sum(), (labels != -100).sum()


def weighted_truth(owner: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    labels, weight = batch.pop("labels"), batch.pop("sample_weight", None)
    return weighted_sum(model(**batch)["logits"], labels, weight)


def weights_later(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    if not update:
        return batch
    return {**batch, "sample_weight": 0.2 + of_samples(batch).abs()}


def equal_weights_first(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    weight = torch.ones(len(batch["input_ids"]), dtype=torch.float64)
    return weights_later(batch, 1) if update else {**batch, "sample_weight": weight}


for name, change in {"come": weights_later, "matter": equal_weights_first}.items():
    case(f"sample weights that {name} later", CAUSE, lambda: made(Weighted), pooled(weighted_truth),
         collator=changing(change), written=as_written(own_loss))  # fmt: skip


# ---- targets outside the mask ---------------------------------------------------------------------------------------


def learns_its_end(batch: dict[str, Tensor], update: int, *, first: int = 0) -> dict[str, Tensor]:
    """The first token of the padding is a target: the end, which no later token has to see."""
    if update < first:
        return batch
    labels, lengths = batch["labels"].clone(), batch["attention_mask"].sum(1)
    for row, length in enumerate(lengths.tolist()):
        labels[row, length : length + 1] = 2
    return {**batch, "labels": labels}


class Tagger(Pooled):
    """One of forty tags for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 40).double()

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.head(self.bert(input_ids, attention_mask=attention_mask).last_hidden_state)
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits.reshape(-1, 40), labels.reshape(-1))
        return found


def tagged(owner: Any, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    labels = batch.pop("labels")
    return summed(model(**batch)["logits"], labels, shift=False)


for name, first in {"later": 1, "at once": 0}.items():
    case(f"targets outside the mask, {name}", CAUSE, llama, pooled(tokens),
         collator=changing(lambda batch, update, first=first: learns_its_end(batch, update, first=first)))  # fmt: skip
    case(f"targets outside the mask, {name}, no shift", CAUSE, lambda: made(Tagger), pooled(tagged),
         collator=changing(lambda batch, update, first=first: learns_its_end(batch, update, first=first)))  # fmt: skip


# ---- a second text --------------------------------------------------------------------------------------------------


class TwoTexts(Pooled):
    """Compares two texts of each sample, padded to one width; only the first has a mask."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        labels: Any = None,
        second_ids: Any = None,
        second_mask: Any = None,
    ) -> Any:
        mask = (second_ids != 0).long() if second_mask is None else second_mask
        first = self.first(input_ids, attention_mask) - self.first(second_ids, mask)
        return self.result(first, labels)


def two_texts(with_mask: bool, first: int) -> Any:
    def change(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
        """The second text of a sample is that of another one, longer or shorter; before `first` as long as its own."""
        texts = (batch["input_ids"], batch["attention_mask"])
        second, mask = (text.flip(0) for text in texts) if update >= first else texts
        given = {"second_ids": torch.where(second > 0, 42 - second, 0)}
        return {**batch, **given, **({"second_mask": mask.clone()} if with_mask else {})}

    return changing(change)


for with_mask in (True, False):
    for first in (0, 1):
        name = f"{'its own attention mask' if with_mask else 'no mask'}, longer from update {first} on"
        case(f"a second text with {name}", CAUSE, lambda: made(TwoTexts), by_samples(own_loss), rows=classes,
             collator=two_texts(with_mask, first))  # fmt: skip


# ---- a first dimension that is no samples ---------------------------------------------------------------------------


class Prototypes(Pooled):
    """Compares samples with a table that comes with the batch and has as many rows as there are samples, by chance."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, table: Any = None) -> Any:
        logits = self.first(input_ids, attention_mask) @ table.T
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits, labels)
        return found


def with_table(rows_of: Any) -> Any:
    def change(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
        return {**batch, "table": numbers(rows_of(len(batch["labels"])), WIDTH, seed=17)}

    return changing(change)


for name, rows_of in {"as many as samples": lambda size: size, "eight": lambda size: 8}.items():
    case(f"a table with {name} rows", CAUSE, lambda: made(Prototypes), by_samples(own_loss), rows=classes,
         collator=with_table(rows_of))  # fmt: skip


class ManyImages(Pooled):
    """Samples have none, one or two images; there happen to be as many images as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3 * IMAGE * IMAGE, WIDTH).double()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        labels: Any = None,
        pixel_values: Any = None,
    ) -> Any:
        seen = self.tower(pixel_values.flatten(1))
        counts = (input_ids == 3).sum(1)
        ends = counts.cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        each = torch.stack([seen[low:high].sum(0) for low, high in zip(starts, ends, strict=True)])
        return self.result(self.first(input_ids, attention_mask) + each, labels)


def uneven_images(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == 3, 4)
    ids[len(ids) // 2 :, 0:2] = 3  # two images in every later sample, none in the others
    if not update:
        ids[:, 0:2] = 4
        ids[:, 0] = 3  # at first one in each
    return {**batch, "input_ids": ids, "pixel_values": of_samples(batch, 3, IMAGE, IMAGE)}


case("as many images as samples by chance", CAUSE, lambda: made(ManyImages), by_samples(own_loss), rows=classes,
     collator=changing(uneven_images), written=as_written(own_loss))  # fmt: skip


# ---- entries of other kinds -----------------------------------------------------------------------------------------


class Padded(Around):
    """Uses a value per token that does not end where the mask does."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        labels: Any = None,
        position_ids: Any = None,
        bias: Any = None,
    ) -> Any:
        self.bias = bias
        return super().forward(input_ids, attention_mask, labels, position_ids)

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        return hidden * (1 + self.bias.sum(1)[:, None, None] / 20)


def biased(batch: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    """Numbers along the padded row; beyond the mask they are zeros at first."""
    bias = of_places(batch)
    return {**batch, "bias": bias if update else bias * batch["attention_mask"]}


case("numbers per place beyond the mask", CAUSE, lambda: made(Padded), pooled(tokens), collator=changing(biased))


def flagged(batch: dict[str, Any], update: int) -> dict[str, Any]:
    return {**batch, "scale": 1.0 if update < 2 else 0.5}


class Scaled(Around):
    """Scaled by a plain number that comes with the batch."""

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, position_ids: Any = None,
        scale: float = 1.0,
    ) -> Any:  # fmt: skip
        self.scale = scale
        return super().forward(input_ids, attention_mask, labels, position_ids)

    def changed(self, hidden: Tensor, mask: Any) -> Tensor:
        return hidden * self.scale


case("a plain number in the batch that changes", CAUSE, lambda: made(Scaled), pooled(tokens),
     collator=changing(flagged))  # fmt: skip
