"""Collators give what transformers' give, live side by side, and say clearly what they cannot collate."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loopwright.errors import ArgumentsError, DataError
from loopwright.pt.data import collators as ours

transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"the cat sat on a mat dog ran far".split(), "##s", "##ing"]
KINDS = ["pt", "np"]


def make_tokenizer(**options):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **{**special, **options})


@pytest.fixture(params=["right", "left"])
def tokenizer(request):
    return make_tokenizer(padding_side=request.param)


def assert_same(mine, theirs):
    assert set(mine) == set(theirs)
    for key, expected in theirs.items():
        got = mine[key]
        if not isinstance(expected, (torch.Tensor, np.ndarray)):
            assert got == expected
            continue
        assert type(got) is type(expected), key
        assert got.dtype == expected.dtype, key
        assert got.shape == expected.shape, key
        assert (got == expected).all(), key


def both(name, features, *args, call=None, **options):
    """What ours and transformers' collator of that name make of copies of the same features."""
    results = []
    for home in (ours, transformers):
        collator = getattr(home, name)(*args, **options)
        copies = [dict(feature) if isinstance(feature, Mapping) else feature for feature in features]
        results.append(collator(copies, **(call or {})))
    return results


def encodings(tokenizer, *texts, **options):
    return [dict(tokenizer(text, **options)) for text in texts]


# The default collator

STACKABLE = {
    "whole labels": [{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}],
    "float labels": [{"x": [1.5, 2.0], "label": 0.5}, {"x": [3.0, 4.0], "label": 1.0}],
    "truth labels": [{"x": 1, "label": True}, {"x": 2, "label": False}],
    "multi-label": [{"x": 1, "label": [0, 1]}, {"x": 2, "label": [1, 1]}],
    "label_ids": [{"x": [1], "label_ids": [0, 1]}, {"x": [2], "label_ids": [1, 1]}],
    "float label_ids": [{"x": [1], "label_ids": [0.0, 1.0]}, {"x": [2], "label_ids": [1.0, 1.0]}],
    "labels stay": [{"x": [1], "labels": [0, 1]}, {"x": [2], "labels": [1, 1]}],
    "strings and None go": [{"x": 1, "text": "a", "none": None}, {"x": 2, "text": "b", "none": None}],
    "None label": [{"x": 1, "label": None, "label_ids": [1]}, {"x": 2, "label": None, "label_ids": [2]}],
    "label before label_ids": [{"x": 1, "label": 3, "label_ids": [1]}, {"x": 2, "label": 4, "label_ids": [2]}],
    "arrays": [{"x": np.ones((2, 3), np.float32)}, {"x": np.zeros((2, 3), np.float32)}],
    "truth": [{"x": True}, {"x": False}],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("features", STACKABLE.values(), ids=STACKABLE.keys())
def test_default_collator_equals_transformers(features, kind):
    assert_same(ours.default_data_collator(features, kind), transformers.default_data_collator(features, kind))


TENSORS = {
    "columns": [{"x": torch.rand(3), "y": torch.arange(2)} for _ in range(4)],
    "label": [{"x": torch.rand(3), "label": torch.tensor(n)} for n in range(4)],
    "float label": [{"x": torch.rand(3), "label": torch.tensor(n / 2, dtype=torch.float64)} for n in range(4)],
    "label of one element": [{"x": torch.rand(3), "label": torch.tensor([n])} for n in range(4)],
    "label_ids": [{"x": torch.rand(3), "label_ids": torch.tensor([n, n])} for n in range(4)],
}


@pytest.mark.parametrize("features", TENSORS.values(), ids=TENSORS.keys())
def test_default_collator_stacks_tensors_as_transformers(features):
    assert_same(ours.default_data_collator(features), transformers.default_data_collator(features))


def test_default_collator_takes_objects_with_attributes():
    @dataclasses.dataclass
    class Sample:
        x: list
        label: int

    features = [Sample([1, 2], 0), Sample([3, 4], 1)]
    assert_same(ours.default_data_collator(features), transformers.default_data_collator(features))
    loose = [SimpleNamespace(x=1), SimpleNamespace(x=2)]
    assert ours.default_data_collator(loose)["x"].tolist() == [1, 2]


def test_default_collator_keeps_numpy_integers_whole():
    batch = ours.default_data_collator([{"label": np.int64(1)}, {"label": np.int64(2)}])
    assert batch["labels"].dtype == torch.int64


def test_default_collator_object_calls_the_function():
    features = [{"x": 1}, {"x": 2}]
    assert isinstance(ours.DefaultDataCollator()(features)["x"], torch.Tensor)
    assert isinstance(ours.DefaultDataCollator(return_tensors="np")(features)["x"], np.ndarray)
    assert isinstance(ours.DefaultDataCollator()(features, return_tensors="np")["x"], np.ndarray)


def test_default_collator_is_a_few_calls_per_batch():
    features = [{"x": torch.rand(4), "labels": torch.tensor(1)} for _ in range(64)]
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        ours.default_data_collator(features)
    finally:
        sys.setprofile(None)
    assert calls <= 16  # and above all not once per sample


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ([{"ids": [1, 2]}, {"ids": [1]}], ["'ids'", "[1, 2]", "DataCollatorWithPadding"]),
        ([{"ids": torch.ones(2)}, {"ids": torch.ones(3)}], ["'ids'", "(2,), (3,)"]),
        ([{"ids": 1}, {"other": 1}], ["Sample 1", "'ids'"]),
        ([{"ids": 1}, {"ids": None}], ["Sample 1", "'ids'"]),
        ([(1, 2), (3, 4)], ["tuple", "data_collator"]),
        ([{"ids": object()}], ["'ids'", "tensor"]),
    ],
)
def test_default_collator_says_what_does_not_fit(features, words):
    with pytest.raises(DataError) as caught:
        ours.default_data_collator(features)
    assert all(word in str(caught.value) for word in words)


def test_unknown_kind_of_tensors_is_refused():
    with pytest.raises(ArgumentsError, match="'pt'.*'np'"):
        ours.default_data_collator([{"x": 1}], return_tensors="tf")


# Padding

PADDINGS = [
    {},
    {"pad_to_multiple_of": 8},
    {"padding": "max_length", "max_length": 12},
    {"padding": "longest"},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", PADDINGS, ids=str)
def test_padding_equals_transformers(tokenizer, options, kind):
    features = encodings(tokenizer, "the cat sat", "a dog ran far on the mat")
    for index, feature in enumerate(features):
        feature["label"] = index
    assert_same(*both("DataCollatorWithPadding", features, tokenizer, return_tensors=kind, **options))


def test_padding_leaves_the_tokenizer_as_it_was(tokenizer):
    before = dict(tokenizer.deprecation_warnings)
    ours.DataCollatorWithPadding(tokenizer)(encodings(tokenizer, "the cat", "a"))
    assert bool(tokenizer.deprecation_warnings.get("Asking-to-pad-a-fast-tokenizer")) == bool(
        before.get("Asking-to-pad-a-fast-tokenizer")
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["label", "labels"])
@pytest.mark.parametrize("options", [{}, {"label_pad_token_id": -1}], ids=str)
def test_token_classification_equals_transformers(tokenizer, name, options, kind):
    features = encodings(tokenizer, "the cat sat", "a dog ran far on the mat")
    for feature in features:
        feature[name] = list(range(len(feature["input_ids"])))
    assert_same(*both("DataCollatorForTokenClassification", features, tokenizer, return_tensors=kind, **options))


def test_token_classification_without_labels(tokenizer):
    features = encodings(tokenizer, "the cat sat", "a")
    assert_same(*both("DataCollatorForTokenClassification", features, tokenizer))


def choices(tokenizer):
    return [{**tokenizer(texts)} for texts in (["the cat", "a dog ran"], ["on the mat", "far"])]


@pytest.mark.parametrize("name", ["label", "labels"])
def test_multiple_choice_equals_transformers(tokenizer, name):
    features = [{**feature, name: index} for index, feature in enumerate(choices(tokenizer))]
    assert_same(*both("DataCollatorForMultipleChoice", features, tokenizer))


def test_multiple_choice_without_labels_and_in_numpy(tokenizer):
    batch = ours.DataCollatorForMultipleChoice(tokenizer, return_tensors="np")(choices(tokenizer))
    assert "labels" not in batch
    assert isinstance(batch["input_ids"], np.ndarray) and batch["input_ids"].shape == (2, 2, 5)


class ShiftingModel:
    def prepare_decoder_input_ids_from_labels(self, labels):
        return labels.roll(1, dims=1) if isinstance(labels, torch.Tensor) else np.roll(labels, 1, axis=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [None, ShiftingModel()], ids=["no model", "model"])
@pytest.mark.parametrize("options", PADDINGS, ids=str)
def test_seq2seq_equals_transformers(tokenizer, options, model, kind):
    features = encodings(tokenizer, "the cat sat", "a dog ran far on the mat")
    features[0]["labels"], features[1]["labels"] = [5, 6, 7, 8, 9], [5, 6]
    assert_same(*both("DataCollatorForSeq2Seq", features, tokenizer, model=model, return_tensors=kind, **options))


def test_seq2seq_without_labels_and_without_padding(tokenizer):
    features = encodings(tokenizer, "the cat sat", "a dog ran")
    mine, theirs = both("DataCollatorForSeq2Seq", features, tokenizer)
    assert theirs.pop("labels") is None  # ours leaves the column out
    assert_same(mine, theirs)
    for feature in features:
        feature["labels"] = [1, 2]
    assert_same(*both("DataCollatorForSeq2Seq", features, tokenizer, padding=False))


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy:UserWarning")  # theirs
@pytest.mark.parametrize("wrap", [list, np.array, torch.tensor])
def test_seq2seq_takes_labels_of_any_kind(tokenizer, wrap):
    features = encodings(tokenizer, "the cat sat", "a dog ran")
    features[0]["labels"], features[1]["labels"] = wrap([5, 6, 7]), wrap([5])
    assert_same(*both("DataCollatorForSeq2Seq", features, tokenizer))


# Language modelling


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 8}], ids=str)
def test_causal_labels_equal_transformers(tokenizer, options, kind):
    features = encodings(tokenizer, "the cat sat", "a dog ran far")
    options = {"mlm": False, "return_tensors": kind, **options}
    assert_same(*both("DataCollatorForLanguageModeling", features, tokenizer, **options))
    lists = [feature["input_ids"] for feature in features]
    assert_same(*both("DataCollatorForLanguageModeling", lists, tokenizer, **options))


def test_causal_labels_without_a_padding_token():
    tokenizer = make_tokenizer(pad_token=None)
    assert_same(*both("DataCollatorForLanguageModeling", [[5, 6], [7, 8]], tokenizer, mlm=False))


def many_features(tokenizer, rows=64, **options):
    return encodings(tokenizer, *(["the cat sat on a mat the dog ran far " * 8] * rows), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [(0.15, 0.8, 0.1), (0.5, 0.2, 0.7), (0.3, 1.0, 0.0), (0.3, 0.0, 0.0)], ids=str)
def test_masking_keeps_its_probabilities(shares, kind):
    tokenizer = make_tokenizer()
    chance, to_mask, to_random = shares
    options = {"mlm_probability": chance, "mask_replace_prob": to_mask, "random_replace_prob": to_random, "seed": 1}
    collator = ours.DataCollatorForLanguageModeling(tokenizer, return_tensors=kind, **options)
    features = many_features(tokenizer)
    original = np.array([feature["input_ids"] for feature in features])
    batch = collator(features)
    inputs, labels = np.asarray(batch["input_ids"]), np.asarray(batch["labels"])
    chosen, body = labels != -100, ~np.isin(original, [0, 2, 3])
    assert not chosen[~body].any()
    assert (labels[chosen] == original[chosen]).all() and (inputs[~chosen] == original[~chosen]).all()
    assert chosen[body].mean() == pytest.approx(chance, abs=0.02)
    assert (inputs[chosen] == 4).mean() == pytest.approx(to_mask + to_random / len(WORDS), abs=0.04)
    kept = 1 - to_mask - to_random + to_random / len(WORDS)
    assert (inputs[chosen] == original[chosen]).mean() == pytest.approx(kept, abs=0.04)


def test_masking_honours_a_given_special_tokens_mask(tokenizer):
    features = encodings(tokenizer, "the cat sat", "a dog ran far", return_special_tokens_mask=True)
    for feature in features:
        feature["special_tokens_mask"] = [1] * len(feature["input_ids"])
    batch = ours.DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0)(features)
    assert "special_tokens_mask" not in batch
    assert (batch["labels"] == -100).all()


def test_masking_with_a_seed_repeats_and_leaves_the_global_stream():
    tokenizer = make_tokenizer()
    features = many_features(tokenizer, rows=4)
    first, second = (ours.DataCollatorForLanguageModeling(tokenizer, seed=3) for _ in range(2))
    before = torch.get_rng_state()
    one, two, next_one = first(features), second(features), first(features)
    assert_same(one, two)
    assert (one["labels"] != next_one["labels"]).any()
    assert torch.equal(before, torch.get_rng_state())


def test_masking_without_a_seed_follows_the_global_stream():
    tokenizer = make_tokenizer()
    features, collator = many_features(tokenizer, rows=4), ours.DataCollatorForLanguageModeling(tokenizer)
    torch.manual_seed(1)
    one = collator(features)
    torch.manual_seed(1)
    assert_same(one, collator(features))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", ["DataCollatorForLanguageModeling", "DataCollatorForWholeWordMask"])
def test_whole_words_are_masked_together(side, make):
    tokenizer = make_tokenizer(padding_side=side)
    texts = ["the cats sat ranning on dogs " * 6, "mats cats dogs " * 4]
    features = encodings(tokenizer, *texts, return_offsets_mapping=True)
    options = {"whole_word_mask": True} if make.endswith("Modeling") else {}
    collator = getattr(ours, make)(tokenizer, mlm_probability=0.5, seed=0, **options)
    batch = collator(features)
    labels, inputs = batch["labels"], batch["input_ids"]
    assert (inputs[labels != -100] == 4).all()
    assert 0 < (labels != -100).sum() < labels.numel()
    original = tokenizer.pad([{"input_ids": f["input_ids"]} for f in features], return_tensors="pt")["input_ids"]
    continued = (original == WORDS.index("##s")) | (original == WORDS.index("##ing"))
    rows, columns = continued.nonzero(as_tuple=True)
    assert len(rows) > 20
    chosen = labels != -100
    assert (chosen[rows, columns] == chosen[rows, columns - 1]).all()


def test_whole_words_need_offsets():
    tokenizer = make_tokenizer()
    with pytest.raises(DataError, match="offset_mapping"):
        ours.DataCollatorForLanguageModeling(tokenizer, whole_word_mask=True)(encodings(tokenizer, "the cat"))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"mlm_probability": 1.5}, "mlm_probability"),
        ({"mlm_probability": None}, "mlm_probability"),
        ({"mask_replace_prob": 0.9, "random_replace_prob": 0.2}, "exceed"),
        ({"mask_replace_prob": -0.1}, "mask_replace_prob"),
        ({"whole_word_mask": True, "mlm": False}, "whole_word_mask"),
    ],
)
def test_impossible_masking_is_refused(options, word):
    with pytest.raises(ArgumentsError, match=word):
        ours.DataCollatorForLanguageModeling(make_tokenizer(), **options)


def test_masking_without_a_mask_token_is_refused():
    with pytest.raises(ArgumentsError, match="mlm=False"):
        ours.DataCollatorForLanguageModeling(make_tokenizer(mask_token=None))


def test_subclass_may_override_the_known_methods():
    class Mine(ours.DataCollatorForLanguageModeling):
        def torch_mask_tokens(self, inputs, special_tokens_mask=None):
            return inputs, inputs + 1

        def torch_call(self, features):
            return {**super().torch_call(features), "extra": 1}

    tokenizer = make_tokenizer()
    batch = Mine(tokenizer)(encodings(tokenizer, "the cat"))
    assert batch["extra"] == 1
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)


# Flattening

FLATTENINGS = [
    {},
    {"return_position_ids": False},
    {"separator_id": -1},
    {"return_flash_attn_kwargs": True},
    {"return_seq_idx": True, "position_ids_start": 2},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("options", FLATTENINGS, ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flattening_equals_transformers(options, labels, kind):
    features = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]
    if labels:
        features = [{**feature, "labels": [9] * len(feature["input_ids"])} for feature in features]
    assert_same(*both("DataCollatorWithFlattening", features, call={"return_tensors": kind}, **options))


def test_flattening_takes_tensors():
    features = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3])}]
    assert ours.DataCollatorWithFlattening()(features)["input_ids"].tolist() == [[1, 2, 3]]


# Parameters

COLLATORS = [name for name in ours.__all__ if name[0] == "D" and hasattr(transformers, name)]


@pytest.mark.parametrize("name", [name for name in COLLATORS if name != "DataCollatorWithFlattening"])
def test_parameters_and_defaults_equal_transformers(name):
    def parameters(cls):
        return [(field.name, field.default) for field in dataclasses.fields(cls)]

    assert parameters(getattr(ours, name)) == parameters(getattr(transformers, name))
