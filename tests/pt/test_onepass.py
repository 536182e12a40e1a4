"""Padding in one numpy pass gives what `tokenizer.pad` gives, and leaves to it what it is not sure of."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from loopwright.pt.data.collators import padding as padding_module
from loopwright.pt.data.collators.onepass import pad_in_one_pass, pad_rows_in_one_pass
from loopwright.pt.data.collators.padding import pad
from loopwright.pt.data.pipeline import collators

transformers = pytest.importorskip("transformers")
from transformers.tokenization_utils_base import BatchEncoding, PreTrainedTokenizerBase  # noqa: E402

WORDS = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "[PAD]"]
ROWS = ("attention_mask", "token_type_ids", "special_tokens_mask")
WRAPS = {
    "list": list,
    "int64": lambda row: np.array(row, np.int64),
    "int32": lambda row: np.array(row, np.int32),
    "uint8": lambda row: np.array(row, np.uint8),
    "big-endian": lambda row: np.array(row, ">i4"),
    "strided": lambda row: np.repeat(np.array(row, np.int64), 2)[::2],
    "torch": lambda row: torch.tensor(row, dtype=torch.int64),
    "torch int32": lambda row: torch.tensor(row, dtype=torch.int32),
    "torch strided": lambda row: torch.tensor(row, dtype=torch.int16).repeat_interleave(2)[::2],
}
LABELS = {
    "int": int,
    "float": lambda n: n / 2,
    "bool": lambda n: n % 2 == 0,
    "int32": np.int32,
    "float32": np.float32,
    "array": lambda n: np.array(n, np.int32),
    "tensor": lambda n: torch.tensor(n, dtype=torch.int32),
    "float tensor": lambda n: torch.tensor(n / 2, dtype=torch.float64),
}


@functools.cache
def backend():
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def make_tokenizer(kind=transformers.PreTrainedTokenizerFast, **options):
    return kind(tokenizer_object=backend(), **{"unk_token": "[UNK]", "pad_token": "[PAD]", **options})


@functools.cache
def cached_tokenizer(with_mask, *told):
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return make_tokenizer(**dict(told), model_input_names=names if with_mask else names[:2])


def slow_calls(act):
    """How often transformers' `pad` ran, by its code: a patched `pad` would itself be unusual."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code is PreTrainedTokenizerBase.pad.__code__

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def assert_identical(mine, theirs):
    assert type(mine) is type(theirs) is BatchEncoding
    assert list(mine) == list(theirs)
    for key, expected in theirs.items():
        got = mine[key]
        assert type(got) is type(expected), key
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), key
        assert (got == expected).all(), key
        assert got.device == expected.device
        assert got.is_contiguous() if isinstance(got, torch.Tensor) else got.flags.c_contiguous and got.flags.writeable


@st.composite
def batches(draw):
    """Samples with some of the padded columns and of the scalar ones, in any order, in rows of one kind."""
    wrap = draw(st.sampled_from(sorted(WRAPS)))
    labels = sorted(LABELS) if wrap != "list" else [name for name in sorted(LABELS) if name in ("int", "float", "bool")]
    named = dict.fromkeys(("input_ids", *draw(st.sets(st.sampled_from(ROWS)))), "row")
    named |= {key: draw(st.sampled_from(labels)) for key in draw(st.sets(st.sampled_from(["label", "idx"])))}
    order = draw(st.permutations(sorted(named)))
    features = []
    for number, length in enumerate(draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))):
        row = st.lists(st.integers(0, 200 if wrap == "uint8" else 30_000), min_size=length, max_size=length)
        made = {key: WRAPS[wrap](draw(row)) if named[key] == "row" else LABELS[named[key]](number) for key in order}
        features.append(draw(st.sampled_from([dict, BatchEncoding]))(made))
    return features


TOKENIZERS = {
    "padding_side": st.sampled_from(["left", "right"]),
    "pad_token_type_id": st.sampled_from([0, 3]),
    "model_max_length": st.sampled_from([12, int(1e30)]),
}
OPTIONS = {
    "padding": st.sampled_from([True, "longest", "max_length", transformers.utils.PaddingStrategy.LONGEST]),
    "max_length": st.sampled_from([None, 9, 11, 12]),
    "pad_to_multiple_of": st.sampled_from([None, 1, 4, 7]),
    "return_tensors": st.sampled_from(["pt", "np"]),
}


@pytest.mark.filterwarnings("ignore:`max_length` is ignored:UserWarning")
@settings(max_examples=200, deadline=None)
@given(
    batches(),
    st.fixed_dictionaries(TOKENIZERS),
    st.fixed_dictionaries(OPTIONS),
    st.booleans(),
)
def test_gives_what_the_tokenizer_gives(features, told, options, with_mask):
    tokenizer = cached_tokenizer(with_mask or "attention_mask" in features[0], *told.items())
    mine = pad_in_one_pass(tokenizer, features, **options)
    unbounded = (options["padding"], options["max_length"], told["model_max_length"] > 12) == ("max_length", None, True)
    assert (mine is None) == unbounded  # a length that is nowhere told is no padding, as transformers has it
    if mine is not None:
        assert_identical(mine, tokenizer.pad(features, **options))


@pytest.mark.parametrize("wrap", ["list", "int64", "torch"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["pt", "np"])
def test_usual_batches_do_not_ask_the_tokenizer(kind, side, wrap):
    tokenizer = make_tokenizer(padding_side=side)
    rows = [tokenizer(text) for text in ("the cat sat the cat", "sat", "the cat")]
    features = [{**{key: WRAPS[wrap](row[key]) for key in row}, "label": n} for n, row in enumerate(rows)]
    collator = collators.DataCollatorWithPadding(tokenizer, return_tensors=kind, pad_to_multiple_of=8)
    assert slow_calls(lambda: collator(features)) == 0
    assert slow_calls(lambda: collators.DataCollatorForLanguageModeling(tokenizer, mlm=False)(features)) == 0
    for each in features:
        each["labels"] = each["input_ids"]
        del each["label"]
    assert slow_calls(lambda: collators.DataCollatorForTokenClassification(tokenizer)(features)) == 0
    assert slow_calls(lambda: collators.DataCollatorForSeq2Seq(tokenizer)(features)) == 0


LONG = 2**70
UNUSUAL = {
    "text": [{"input_ids": [1, 2], "text": "a"}, {"input_ids": [3], "text": "b"}],
    "none": [{"input_ids": [1, 2], "idx": None}, {"input_ids": [3], "idx": None}],
    "vectors": [{"input_ids": [1, 2], "labels": [0, 1]}, {"input_ids": [3], "labels": [1, 1]}],
    "ragged": [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3], "labels": [3]}],
    "nested": [{"input_ids": [[1, 2]]}, {"input_ids": [[3, 4]]}],
    "floats": [{"input_ids": [1.0, 2.0]}, {"input_ids": [3.0]}],
    "floats behind": [{"input_ids": [1, 2.5]}, {"input_ids": [3]}],
    "truths": [
        {"input_ids": [1, 2], "attention_mask": [True, True]},
        {"input_ids": [3, 4], "attention_mask": [True] * 2},
    ],
    "numpy truths": [{"input_ids": np.array([1, 2]), "attention_mask": np.array([True, False])}],
    "torch truths": [{"input_ids": torch.tensor([1, 2]), "attention_mask": torch.tensor([True, False])}],
    "numpy numbers in a list": [{"input_ids": [1, np.int32(2)]}, {"input_ids": [3]}],
    "numpy numbers first": [{"input_ids": [np.int32(1)]}, {"input_ids": [3]}],
    "floats in numpy": [{"input_ids": np.array([1.0, 2.0])}, {"input_ids": np.array([3.0])}],
    "floats in torch": [{"input_ids": torch.tensor([1.0, 2.0])}, {"input_ids": torch.tensor([3.0])}],
    "wide": [{"input_ids": np.array([1, 2], np.uint64)}],
    "too big": [{"input_ids": [1, LONG]}],
    "tables": [{"input_ids": np.array([[1, 2]])}, {"input_ids": np.array([[3, 4]])}],
    "torch tables": [{"input_ids": torch.ones(1, 2, dtype=torch.int64)}],
    "a mask of two dimensions": [{"input_ids": np.array([1, 2]), "attention_mask": np.ones((2, 2), np.int64)}] * 2,
    "tuples": [{"input_ids": (1, 2)}, {"input_ids": (3, 4)}],
    "list and numpy": [{"input_ids": [1, 2]}, {"input_ids": np.array([3])}],
    "numpy and torch": [{"input_ids": np.array([1])}, {"input_ids": torch.tensor([3])}],
    "mask of another kind": [{"input_ids": np.array([1, 2]), "attention_mask": [1, 1]}],
    "arrays beside lists": [
        {"input_ids": [1], "label": np.array(1, np.int32)},
        {"input_ids": [3], "label": np.array(2)},
    ],
    "tensors beside lists": [
        {"input_ids": [1], "label": torch.tensor(1)},
        {"input_ids": [3], "label": torch.tensor(2)},
    ],
    "mask of another length": [{"input_ids": [1, 2], "attention_mask": [1]}, {"input_ids": [3], "attention_mask": [1]}],
    "lacking": [{"input_ids": [1, 2], "label": 1}, {"input_ids": [3]}],
    "no ids": [{"attention_mask": [1]}],
    "nothing": [],
    "columns": {"input_ids": [[1, 2], [3]]},
    "one sample": {"input_ids": [1, 2]},
    "numbers": [1, 2],
    "a sample that is no mapping": [{"input_ids": [1]}, 3],
}


def outcome(act):
    """What came out, or the error and its words."""
    try:
        return dict(act())
    except Exception as error:
        return type(error), str(error)


def assert_same_outcome(mine, theirs):
    assert repr(mine) == repr(theirs)  # small, and objects in arrays compare no better
    if isinstance(theirs, dict):
        assert {key: value.dtype for key, value in mine.items()} == {key: value.dtype for key, value in theirs.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("features", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_unusual_batches_are_left_to_the_tokenizer(features, kind):
    tokenizer = make_tokenizer()
    assert pad_in_one_pass(tokenizer, features, return_tensors=kind) is None
    results = []
    assert slow_calls(lambda: results.append(outcome(lambda: pad(tokenizer, features, return_tensors=kind)))) == 1
    assert_same_outcome(results[0], outcome(lambda: tokenizer.pad(features, return_tensors=kind)))


@pytest.mark.filterwarnings("ignore:`max_length` is ignored:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"padding": False},
        {"padding": "do_not_pad"},
        {"padding": "max_length"},  # the tokenizer knows no length
        {"padding": "max_length", "max_length": 2},
        {"padding": "max_length", "max_length": 8.0},
        {"pad_to_multiple_of": 0},
        {"pad_to_multiple_of": -4},
        {"pad_to_multiple_of": 4.0},
        {"return_tensors": None},
        {"return_tensors": "mlx"},
    ],
    ids=str,
)
def test_unusual_options_are_left_to_the_tokenizer(options):
    features = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    assert pad_in_one_pass(make_tokenizer(), features, **{"return_tensors": "pt", **options}) is None


@pytest.mark.parametrize("options", [{"padding": "nonsense"}, {"padding": None}], ids=str)
def test_wrong_options_fail_in_the_words_of_the_tokenizer(options):
    features = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    mine, theirs = (
        outcome(lambda act=act: act(features, return_tensors="pt", **options))
        for act in (functools.partial(pad, make_tokenizer()), make_tokenizer().pad)
    )
    assert mine == theirs and mine[0] is ValueError


def test_a_tokenizer_without_a_padding_token_fails_in_its_own_words():
    tokenizer = make_tokenizer(pad_token=None)
    assert pad_in_one_pass(tokenizer, [{"input_ids": [1]}], return_tensors="pt") is None
    with pytest.raises(ValueError, match="does not have a padding token"):
        pad(tokenizer, [{"input_ids": [1]}], return_tensors="pt")


def test_an_ignored_max_length_is_warned_of_as_by_the_tokenizer():
    with pytest.warns(UserWarning, match="`max_length` is ignored") as caught:
        pad(make_tokenizer(), [{"input_ids": [1]}], max_length=4, return_tensors="pt")
    assert len(caught) == 1


class OwnPad(transformers.PreTrainedTokenizerFast):
    def pad(self, *args, **options):
        return "own"


class OwnInnerPad(transformers.PreTrainedTokenizerFast):
    def _pad(self, encoded_inputs, **options):
        return {**super()._pad(encoded_inputs, **options), "extra": 1}


FEATURES = [{"input_ids": [1, 2]}, {"input_ids": [3]}]


def test_a_tokenizer_with_padding_of_its_own_is_asked():
    assert pad(make_tokenizer(OwnPad), FEATURES, return_tensors="pt") == "own"
    assert pad(make_tokenizer(OwnInnerPad), FEATURES, return_tensors="pt")["extra"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["pad", "_pad"])
@pytest.mark.parametrize("place", ["object", "class", "base"])
def test_replaced_padding_is_asked(place, name, monkeypatch):
    tokenizer = make_tokenizer()
    home = {"object": tokenizer, "class": type(tokenizer), "base": PreTrainedTokenizerBase}[place]
    original, calls = getattr(home, name), []

    @functools.wraps(original)
    def counting(*args, **options):
        calls.append(name)
        return original(*args, **options)

    monkeypatch.setattr(home, name, counting)
    pad(tokenizer, FEATURES, return_tensors="pt")
    assert calls
    monkeypatch.undo()
    vars(tokenizer).pop(name, None)  # where pytest puts the method back onto the object
    assert pad_in_one_pass(tokenizer, FEATURES, return_tensors="pt") is not None


def test_a_padding_that_knows_other_columns_is_asked(monkeypatch):
    # As a later version of transformers would be: the same names, another code.
    code = PreTrainedTokenizerBase._pad.__code__
    monkeypatch.setattr(PreTrainedTokenizerBase._pad, "__code__", code.replace(co_consts=(*code.co_consts, "places")))
    assert pad_in_one_pass(make_tokenizer(), FEATURES, return_tensors="pt") is None


def test_a_mask_the_model_does_not_take_is_left_to_the_tokenizer():
    tokenizer = make_tokenizer(model_input_names=["input_ids"])
    features = [{**feature, "attention_mask": [1] * len(feature["input_ids"])} for feature in FEATURES]
    assert pad_in_one_pass(tokenizer, features, return_tensors="pt") is None
    tokenizer = make_tokenizer(model_input_names=["input_values", "input_ids"])
    assert pad_in_one_pass(tokenizer, features, return_tensors="pt") is None


def test_what_is_no_transformers_tokenizer_is_asked():
    class Tokenizer:
        def pad(self, features, **options):
            return options

    assert pad(Tokenizer(), FEATURES, return_tensors="pt") == {"return_tensors": "pt"}


def test_the_batch_shares_no_memory_with_the_samples():
    rows = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    batch = pad_in_one_pass(make_tokenizer(), [{"input_ids": row} for row in rows], return_tensors="pt")
    batch["input_ids"].zero_()
    assert [row.tolist() for row in rows] == [[1, 2], [3, 4]]


def test_the_default_device_is_heeded_as_by_the_tokenizer():
    tokenizer = make_tokenizer()
    with torch.device("meta"):
        mine = pad_in_one_pass(tokenizer, FEATURES, return_tensors="pt")
        theirs = tokenizer.pad(FEATURES, return_tensors="pt")
    assert {key: value.device.type for key, value in mine.items()} == dict.fromkeys(theirs, "meta")


# Labels


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(-100, 100), max_size=6), min_size=1, max_size=5),
    st.sampled_from(["list", "int64", "int32", "torch"]),
    st.sampled_from(["left", "right"]),
    st.integers(0, 3),
    st.sampled_from([-100, 0]),
)
def test_labels_are_what_lists_give(rows, wrap, side, more, fill):
    length = max(map(len, rows)) + more
    got = pad_rows_in_one_pass([WRAPS[wrap](row) for row in rows], length, fill, side)
    extra = [[fill] * (length - len(row)) for row in rows]
    sides = [pads + row if side == "left" else row + pads for row, pads in zip(rows, extra, strict=True)]
    assert got.dtype == np.int64 and got.shape == (len(rows), length) and got.tolist() == sides


@pytest.mark.parametrize(
    ("rows", "length", "fill"),
    [([[1, 2, 3]], 2, 0), ([[1.0]], 2, 0), ([[1], np.array([1])], 2, 0), ([[1]], 2, None), ([], 2, 0), ([1], 2, 0)],
    ids=str,
)
def test_unusual_labels_are_left_to_lists(rows, length, fill):
    assert pad_rows_in_one_pass(rows, length, fill, "right") is None


def test_labels_that_are_no_whole_numbers_come_out_as_before():
    assert padding_module._pad_labels([[True], [1.0, 2.0]], 2, -100, "left") == [[-100, True], [1.0, 2.0]]
    assert padding_module._pad_labels([(1,), (1, 2)], 2, -100, "right") == [[1, -100], [1, 2]]
