"""Mistakes of a first script: a path instead of data, a class instead of a model."""

from pathlib import Path

import pytest
from torch import nn

from loopwright import Trainer, TrainingArguments
from loopwright.errors import ArgumentsError, DataError


def test_a_path_is_not_a_dataset(tmp_path: Path) -> None:
    trainer = Trainer(nn.Linear(2, 1), TrainingArguments(str(tmp_path), max_steps=1), train_dataset="train.csv")
    with pytest.raises(DataError, match=r"the training dataset is the text 'train.csv'; load the data first"):
        trainer.train()


def test_a_class_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match="not the class Linear; create it first"):
        Trainer(nn.Linear, TrainingArguments(str(tmp_path)))
