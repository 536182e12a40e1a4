"""Classifying images of a folder."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..args.field import Group, arg, positive
from ..errors import ArgumentsError, DataError, first_line
from .declaration import CLASS_METRICS, Materials, Task
from .fields import DataFields
from .request import Request


@dataclass
class ImageFields(Group):
    """Options of images."""

    title = "data"

    image_size: int | None = arg(
        None, "Height and width to which images are resized; defaults to that of the model.", check=positive
    )


@dataclass
class ImageData(ImageFields, DataFields):
    """The block `data` of image classification: `train` and `validation` are folders with one folder for each class."""


def build(request: Request) -> Materials:
    """Model and data of image classification."""
    from ..pt.data.collators import DefaultDataCollator
    from .data.images import Images, image_files, transform_for
    from .data.labels import class_metrics, class_options, unseen_classes
    from .model.models import known_labels, load_model

    data: ImageData = request.data
    if not isinstance(data.train, str):
        raise ArgumentsError(f"{request.place('data.train')}: folders of images cannot be mixed; name one folder")
    train = image_files(Path(data.train), request.place("data.train"))
    held = None if data.validation is None else image_files(Path(data.validation), request.place("data.validation"))
    names = list(train)
    _check_classes(names, held, request)
    known = known_labels(request)
    names = known if {*known} == {*names} else names
    pairs = [(file, names.index(name)) for name, files in train.items() for file in files]
    held_pairs = None if held is None else [(file, names.index(name)) for name, files in held.items() for file in files]
    if data.validation_share:
        pairs, held_pairs = _held_out(pairs, data.validation_share, request.seed)
    pairs = _first_of_all(pairs, data.max_train_samples)
    held_pairs = None if held_pairs is None else _first_of_all(held_pairs, data.max_validation_samples)
    model = load_model(
        request,
        "AutoModelForImageClassification",
        **class_options(names),
    )
    transform = transform_for(request, getattr(model, "config", None))
    if data.image_size is not None:
        _check_size(model, transform, request)

    def count(chosen: list[tuple[Path, int]] | None) -> Counter[str]:
        return Counter(names[label] for _, label in chosen or ())

    def samples(chosen: list[tuple[Path, int]]) -> Any:
        return Images([file for file, _ in chosen], [label for _, label in chosen], transform)

    return Materials(
        model=model,
        train_dataset=samples(pairs),
        eval_dataset=None if held_pairs is None else samples(held_pairs),
        processing_class=transform,
        data_collator=DefaultDataCollator(),
        compute_metrics=class_metrics(request.metrics),
        notes=unseen_classes(count(pairs), count(held_pairs), str(data.train)),
    )


def _check_size(model: Any, transform: Any, request: Request) -> None:
    """Raise if the model does not take images of the requested size."""
    import torch

    images = torch.zeros(2, len(transform.mean), transform.height, transform.width)
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(images.to(next(model.parameters())))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ArgumentsError(
            f"{request.place('data.image_size')}={transform.height}: the model does not take images of this size "
            f"({first_line(error)}); remove it to use the size of the model"
        ) from None
    finally:
        model.train(was_training)


def _check_classes(names: list[str], held: Any, request: Request) -> None:
    place = request.place("data.train")
    if len(names) < 2:
        raise DataError(f"{place}: {request.data.train} has only the class {names[0]!r}; add a folder for another one")
    unknown = [name for name in held or () if name not in names]
    if unknown:
        raise DataError(
            f"{request.place('data.validation')}: the class {unknown[0]!r} is not one of the training data: "
            f"{', '.join(names)}"
        )


def _held_out(pairs: list[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    count = min(len(pairs) - 1, max(1, round(len(pairs) * share)))
    chosen = set(random.Random(seed).sample(range(len(pairs)), count))
    rest = [pair for index, pair in enumerate(pairs) if index not in chosen]
    return rest, [pairs[index] for index in sorted(chosen)]


def _first_of_all(pairs: list[tuple[Path, int]], count: int | None) -> list[tuple[Path, int]]:
    """The first samples of each class in turn: the first ones of a folder would be of one class."""
    if count is None or count >= len(pairs):
        return pairs
    seen: Counter[int] = Counter()
    turns = []
    for index, (_, label) in enumerate(pairs):
        turns.append((seen[label], index))
        seen[label] += 1
    return [pairs[index] for index in sorted(index for _, index in sorted(turns)[:count])]


TASK = Task(
    name="image-classification",
    help="classify images; the data are folders with one folder for each class",
    data=ImageData,
    metrics=CLASS_METRICS,
    default_metrics=("accuracy",),
    build=build,
    example={"model": "google/vit-base-patch16-224-in21k", "data": {"train": "images", "validation_share": 0.1}},
)
