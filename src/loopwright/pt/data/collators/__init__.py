"""Data collators: convert lists of samples to batches, with transformers' names, parameters and results.

None needs transformers. Every collator returns torch tensors (`return_tensors="pt"`) or numpy arrays (`"np"`).
"""

from .flattening import DataCollatorWithFlattening
from .language import DataCollatorForLanguageModeling, DataCollatorForWholeWordMask
from .padding import (
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)
from .stacking import DataCollatorMixin, DefaultDataCollator, default_data_collator

__all__ = [
    "DataCollatorForLanguageModeling",
    "DataCollatorForMultipleChoice",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorForWholeWordMask",
    "DataCollatorMixin",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
    "default_data_collator",
]
