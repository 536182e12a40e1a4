"""Generation in batches of similar length: the same arrays as with the collator's batches, in fewer calls."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loopwright import Seq2SeqTrainer, Seq2SeqTrainingArguments
from loopwright.pt.evaluation.generation_options import GenerationOptions
from loopwright.pt.evaluation.joined_batches import CannotJoin, JoinedRows, lengths_of_results

transformers = pytest.importorskip("transformers")

PAD, END, START, WORDS = 0, 1, 2, 40


def peaked(model: Any) -> Any:
    """Make a model count upwards from the last token, which ends after a number of tokens that differs by row."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(WORDS, model.config.hidden_size, generator=generator)
        model.get_input_embeddings().weight.copy_(table)
        follows = torch.roll(table, 1, 0)  # the head of a token is the embedding of the one before it
        follows[END] = table[WORDS - 1]
        follows[START] = 0
        model.get_output_embeddings().weight.copy_(follows)
    return model


# With a lock, because other state that a model refers to is restored after a comparison.
TALLY = SimpleNamespace(forwards=0, seconds=0.0, sizes=set(), lock=Lock())


class Llama(transformers.LlamaForCausalLM):
    """A tiny decoder-only model that counts its forward passes."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        tokens = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": START, "tie_word_embeddings": False}
        super().__init__(transformers.LlamaConfig(vocab_size=WORDS, **sizes, **tokens, **options))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        TALLY.forwards += 1  # not on the model: one that changes while it generates keeps the collator's batches
        return super().forward(*args, **kwargs)


class T5(transformers.T5ForConditionalGeneration):
    """A tiny encoder-decoder model; its answers depend on the encoder because its weights are large."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "initializer_factor": 3.0}
        tokens = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": START}
        super().__init__(transformers.T5Config(vocab_size=WORDS, dropout_rate=0.0, **sizes, **tokens))
        with torch.no_grad():
            self.get_output_embeddings().weight[END] *= 2.5
            self.decoder.block[0].layer[1].EncDecAttention.o.weight *= 8


def samples(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Prompts of 2 to 14 tokens; the answer of the last 30 numbers is reached within 10 tokens."""
    found, generator = [], torch.Generator().manual_seed(seed)
    for _ in range(count):
        length = int(torch.randint(2, 15, (1,), generator=generator))
        prompt = torch.randint(3, WORDS, (length,), generator=generator).tolist()
        answer = torch.randint(3, WORDS, (length % 4 + 1,), generator=generator).tolist()
        found.append({"prompt": prompt, "answer": [*answer, END]})
    return found


def padded(rows: list[list[int]], fill: int, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[fill] * (width - len(r)) + r if left else r + [fill] * (width - len(r)) for r in rows])


def causal(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    rows = [each["prompt"] + each["answer"] for each in items]
    labels = [[-100] * len(each["prompt"]) + each["answer"] for each in items]
    return {
        "input_ids": padded(rows, PAD),
        "attention_mask": padded([[1] * len(row) for row in rows], 0),
        "labels": padded(labels, -100),
    }


def pairs(items: list[dict[str, list[int]]], left: bool = False) -> dict[str, torch.Tensor]:
    rows = [each["prompt"] for each in items]
    return {
        "input_ids": padded(rows, PAD, left),
        "attention_mask": padded([[1] * len(row) for row in rows], 0, left),
        "labels": padded([each["answer"] for each in items], -100),
    }


def count_tokens(prediction: Any) -> dict[str, float]:
    found = prediction.predictions
    return {"tokens": float(sum((each > PAD).sum() for each in found))}


def trainer(folder: Any, model: Any, collator: Any, cls: Any = Seq2SeqTrainer, **options: Any) -> Any:
    defaults = {"per_device_eval_batch_size": 3, "use_cpu": True, "predict_with_generate": True,
                "disable_tqdm": True, "generation_max_length": 10}  # fmt: skip
    args = Seq2SeqTrainingArguments(str(folder), **{**defaults, **options})
    return cls(model, args, collator, compute_metrics=count_tokens)


def joined(owner: Any) -> Any:
    return owner._loopwright.evaluation._joined


def both(folder: Any, make: Any, collator: Any, data: Any, call: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """The outputs with the collator's batches and with speed="max", and the second trainer."""
    off = trainer(folder, make(), collator, speed="off", **options).predict(data, **(call or {}))
    owner = trainer(folder, make(), collator, **{"speed": "max", **options})
    return off, owner.predict(data, **(call or {})), owner


def assert_same(off: Any, on: Any) -> None:
    for name in ("predictions", "label_ids"):
        one, other = getattr(off, name), getattr(on, name)
        for a, b in zip(one, other, strict=True) if isinstance(one, list) else [(one, other)]:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    for name in ("test_loss", "test_tokens"):
        assert off.metrics.get(name) == on.metrics.get(name)


MODELS = {"llama": (lambda: peaked(Llama()), causal), "t5": (T5, pairs)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {"include_for_metrics": ["inputs", "loss"]},
        {"call": {"num_beams": 2, "max_new_tokens": 6}, "eval_do_concat_batches": False},
        {"call": {"max_new_tokens": 7, "min_new_tokens": 3}, "per_device_eval_batch_size": 1},
    ],
    ids=str,
)
def test_arrays_are_those_of_the_collators_batches(tmp_path: Any, name: str, options: dict[str, Any]) -> None:
    make, collator = MODELS[name]
    off, on, owner = both(tmp_path, make, collator, samples(23), **options)
    assert joined(owner).reason is None and joined(owner)._made >= 1
    assert_same(off, on)
    answers = np.concatenate(on.predictions) if isinstance(on.predictions, list) else on.predictions
    assert len({int((row > END).sum()) for row in answers}) > 1  # rows end at different places


def with_beginnings(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Answers begin with the start token and the first token of the prompt."""
    inputs = {name: value for name, value in pairs(items).items() if name != "labels"}
    return {**inputs, "decoder_input_ids": torch.tensor([[START, each["prompt"][0]] for each in items])}


@pytest.mark.parametrize("speed", ["off", "max"])
def test_answers_begin_with_the_decoders_inputs_as_in_transformers(tmp_path: Any, speed: str) -> None:
    theirs = transformers.Seq2SeqTrainer(
        T5(),
        transformers.Seq2SeqTrainingArguments(
            str(tmp_path), predict_with_generate=True, per_device_eval_batch_size=3, use_cpu=True, disable_tqdm=True,
            report_to=[], generation_max_length=24, remove_unused_columns=False,
        ),
        with_beginnings,
    )  # fmt: skip
    ours = trainer(tmp_path, T5(), with_beginnings, speed=speed, generation_max_length=24)
    data = samples(9)
    found = ours.predict(data).predictions
    np.testing.assert_array_equal(found, theirs.predict(data).predictions)
    assert found[:, 1].tolist() == [each["prompt"][0] for each in data]


@pytest.mark.parametrize("speed", ["off", "max"])
@pytest.mark.parametrize("new", [None, 31])
@pytest.mark.parametrize("name", MODELS)
def test_generated_ids_of_all_batches_have_one_width(tmp_path: Any, name: str, new: int | None, speed: str) -> None:
    """Also without an argument for the length: the padding of arrays, -100, is no token."""
    make, collator = MODELS[name]
    model = make()
    model.generation_config.eos_token_id = [END, *range(7, WORDS, 9)] if name == "llama" else END
    config = transformers.GenerationConfig(**{**model.generation_config.to_dict(), "max_new_tokens": new})
    owner = trainer(tmp_path, model, collator, speed=speed, generation_max_length=None, per_device_eval_batch_size=1)
    found = owner.predict(samples(8), **({"generation_config": config} if new else {})).predictions
    assert found.shape[1] == (new or 20) + (name == "t5") and (found >= 0).all()
    assert len({int((row > END).sum()) for row in found}) > 1


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_options_without_a_value_are_those_of_the_model(tmp_path: Any, call: str) -> None:
    """The scripts of transformers pass num_beams=None if it is not chosen."""
    owner = trainer(tmp_path, T5(), pairs, generation_max_length=None)
    plain, none = (
        getattr(owner, call)(samples(5), **options) for options in ({}, {"max_length": None, "num_beams": None})
    )
    if call == "evaluate":
        assert plain["eval_tokens"] == none["eval_tokens"]
    else:
        np.testing.assert_array_equal(plain.predictions, none.predictions)


@pytest.mark.parametrize("name", MODELS)
def test_arrays_are_those_of_transformers(tmp_path: Any, name: str) -> None:
    make, collator = MODELS[name]
    data = [{**each, "answer": [END]} for each in samples(38)]
    if name == "llama":
        data = [{"prompt": each["prompt"], "answer": []} for each in data]
    ours = trainer(tmp_path, make(), collator if name == "t5" else prompts_only).predict(data)
    options = {"generation_max_length": 10} if name == "t5" else {}
    model = make()
    if name == "llama":
        model.generation_config.max_new_tokens = 10
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, per_device_eval_batch_size=3, use_cpu=True,
        remove_unused_columns=False, **options,
    )  # fmt: skip
    theirs = transformers.Seq2SeqTrainer(model, args, collator if name == "t5" else prompts_only).predict(data)
    expected = theirs.predictions
    if name == "llama":  # transformers keeps the prompts, as wide as in their batch
        expected = np.full((38, 10), -100)
        for start in range(0, 38, 3):
            width = max(len(each["prompt"]) for each in data[start : start + 3])
            rows = theirs.predictions[start : start + 3, width : width + 10]
            expected[start : start + 3, : rows.shape[1]] = rows
        expected = np.where(expected == -100, PAD, expected)
    np.testing.assert_array_equal(ours.predictions, expected)


def prompts_only(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, without labels."""
    return {name: value for name, value in pairs(items, left=True).items() if name != "labels"}


def test_fewer_forward_passes(tmp_path: Any) -> None:
    data = samples(72)
    plain = trainer(tmp_path, peaked(Llama()), prompts_only, speed="off")
    TALLY.forwards = 0
    plain.predict(data)
    alone = TALLY.forwards
    fast = trainer(tmp_path, peaked(Llama()), prompts_only, full_determinism=True)
    first = fast.predict(data)
    assert joined(fast)._is_on
    TALLY.forwards = 0
    again = fast.predict(data)  # proved already
    np.testing.assert_array_equal(first.predictions, again.predictions)
    assert 0 < TALLY.forwards < alone / 4


def test_joined_batches_do_not_use_kernels_that_are_prepared_for_each_shape(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loopwright.pt.evaluation import joined_generation

    within = [False]
    TALLY.sizes.clear()

    @contextmanager
    def without_cudnn() -> Any:
        within[0] = True
        yield
        within[0] = False

    monkeypatch.setattr(joined_generation, "without_cudnn", without_cudnn)

    class Watched(Llama):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            TALLY.sizes.add((within[0], len(input_ids)))
            return super().forward(input_ids, **kwargs)

    made = trainer(tmp_path, peaked(Watched()), prompts_only, full_determinism=True)
    made.predict(samples(72))
    assert joined(made)._is_on
    largest = {is_within: max(size for where, size in TALLY.sizes if where is is_within) for is_within in (False, True)}
    assert largest[True] > largest[False]


# ---- models that are not ordinary ------------------------------------------------------------------------------------


class Odd(Llama):
    """Another token for some calls or batches."""

    way = ""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest = 0, 1000

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if self.way == "counts":
            self.calls += 1
            outputs.logits[..., 3 + self.calls % 30] += 20
        elif self.way == "draws":
            outputs.logits = outputs.logits + 20 * torch.randn_like(outputs.logits)
        elif self.way == "drops":
            outputs.logits = nn.functional.dropout(outputs.logits, 0.3, training=True)
        if len(outputs.logits) > self.largest:
            outputs.logits = outputs.logits.flip(0)
        return outputs


@pytest.mark.parametrize("way", ["counts", "draws", "drops"])
def test_models_that_change_while_they_generate_keep_their_batches(tmp_path: Any, way: str) -> None:
    found = []
    for speed in ("off", "max"):
        torch.manual_seed(3)
        model = peaked(Odd())
        model.way = way
        owner = trainer(tmp_path, model, prompts_only, speed=speed)
        found.append((owner.predict(samples(30)).predictions, model.calls, torch.get_rng_state().tolist()))
    assert joined(owner)._is_on is False and joined(owner)._made == 0, joined(owner).reason
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:], "a comparison leaves no trace"


def mixes_rows(model: Any) -> None:
    model.largest = 4


def mixes_rows_by_another_forward(model: Any) -> None:
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = plain(*args, **kwargs)
        outputs.logits = outputs.logits.flip(0) if len(outputs.logits) > 4 else outputs.logits
        return outputs

    model.forward = forward


@pytest.mark.parametrize("change", [mixes_rows, mixes_rows_by_another_forward])
def test_a_change_between_evaluations_is_found_in_the_first_window(tmp_path: Any, change: Any) -> None:
    owner = trainer(tmp_path, peaked(Odd()), prompts_only, speed="max")
    expected = owner.predict(samples(72)).predictions
    assert joined(owner)._is_on
    change(owner.model)
    np.testing.assert_array_equal(owner.predict(samples(72)).predictions, expected)
    assert joined(owner)._is_on is False and "other tokens" in joined(owner).reason


# ---- what keeps the collator's batches ------------------------------------------------------------------------------


class OwnStep(Seq2SeqTrainer):
    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(*args, **kwargs)


class OwnGenerate(Llama):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


def refusing(folder: Any, case: str) -> Any:
    cls = OwnStep if case == "prediction_step" else Seq2SeqTrainer
    model = peaked(OwnGenerate() if case == "generate is not" else Llama())
    if case == "has a hook":
        model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    return trainer(folder, model, causal, cls=cls, speed="max")


@pytest.mark.parametrize(
    ("case", "call"),
    [
        ("prediction_step", {}),
        ("generate is not", {}),
        ("has a hook", {}),
        ("do_sample=True", {"do_sample": True, "top_k": 1}),
        ("repetition_penalty=1.3", {"repetition_penalty": 1.3}),
        ("no_repeat_ngram_size=2", {"no_repeat_ngram_size": 2}),
        ("min_length=9", {"min_length": 9}),
        ("generation_max_length or max_new_tokens", {"max_length": 30}),
        ("stopping_criteria", {"stopping_criteria": [lambda ids, scores, **_: ids[:, -1] == 7]}),
    ],
)
def test_what_is_not_served_is_reported_once(tmp_path: Any, caplog: Any, case: str, call: dict[str, Any]) -> None:
    data = samples(9)
    with caplog.at_level(logging.INFO, "loopwright"):
        owner = refusing(tmp_path, case)
        first, second = owner.predict(data, **call), owner.predict(data, **call)
    lines = [each.message for each in caplog.records if "generation keeps the collator's batches" in each.message]
    assert len(lines) == 1 and case in lines[0]
    off = trainer(tmp_path, peaked(Llama()), causal, speed="off").predict(data, **call)
    assert_same(off, first)
    assert_same(off, second)


def test_options_that_read_the_decoders_tokens_are_served_with_an_encoder() -> None:
    config = transformers.GenerationConfig(no_repeat_ngram_size=3, min_length=2, max_length=20, num_beams=4)
    model: Any = type("Model", (), {"generation_config": config})
    options = GenerationOptions.of(model, {"max_new_tokens": 5})
    assert options.why_not(has_encoder=True) is None
    assert options.why_not(has_encoder=False) == "min_length=2 is set"
    assert "max_time" in str(GenerationOptions.of(model, {"max_time": 1.0}).why_not(has_encoder=True))
    passed = transformers.GenerationConfig(do_sample=True)
    assert "do_sample" in str(GenerationOptions.of(model, {"generation_config": passed}).why_not(has_encoder=True))
    assert GenerationOptions.of(model, {"do_sample": False, "length_penalty": 2.0}).why_not(has_encoder=True) is None


def test_short_evaluations_and_data_without_a_length_are_not_compared(tmp_path: Any) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(samples(15))

    for data, level in ((samples(33), "auto"), (samples(6), "max"), (Stream(), "max")):
        owner = trainer(tmp_path, peaked(Llama()), causal, speed=level, generation_max_length=2)
        owner.predict(data)
        assert joined(owner)._is_on is None


class Crowded(Llama):
    """Gives other tokens when more than `limit` rows are in a batch, as a model that mixes its rows does."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, **kwargs)
        if len(out.logits) > self.limit:
            out.logits = out.logits.roll(1, -1)
        return out


@pytest.mark.parametrize(("limit", "windows"), [(3, 0), (12, 1)])
def test_other_tokens_are_detected(tmp_path: Any, caplog: Any, limit: int, windows: int) -> None:
    """In the first two batches of three rows, or when larger ones follow; no wrong token is returned."""
    with caplog.at_level(logging.INFO, "loopwright"):
        off, on, owner = both(tmp_path, lambda: peaked(Crowded(limit)), causal, samples(40))
    assert_same(off, on)
    assert "in joined batches" in joined(owner).reason
    assert joined(owner)._made == windows
    assert sum("keeps the collator's batches" in each.message for each in caplog.records) == 1


class Padded(Llama):
    """Its tokens depend on the width of the batch, as those of a recurrent model that reads padding do."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, **kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None and not mask.all():
            out.logits = out.logits.roll(1, -1)
        return out


def test_padding_is_compared_even_if_the_first_batches_have_none(tmp_path: Any) -> None:
    data = [{**each, "prompt": [5, 6, 7]} for each in samples(15)] + samples(15)
    off, on, owner = both(tmp_path, lambda: peaked(Padded()), prompts_only, data)
    np.testing.assert_array_equal(off.predictions, on.predictions)
    assert "in joined batches" in joined(owner).reason and joined(owner)._made == 0


def test_positions_that_depend_on_the_longest_row_are_refused(tmp_path: Any) -> None:
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    make = lambda: peaked(Llama(max_position_embeddings=20, rope_parameters=dict(scaled)))  # noqa: E731
    off, on, owner = both(tmp_path, make, prompts_only, samples(30))
    np.testing.assert_array_equal(off.predictions, on.predictions)
    assert joined(owner).reason == "beyond 19 tokens the model's positions depend on the longest row of a batch"


class Timed(Llama):
    """A model with a clock, by which a forward pass takes as long as the number of rows tells."""

    def __init__(self, *seconds: tuple[int, float]) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        TALLY.seconds += next(seconds for most, seconds in self.seconds if len(input_ids) <= most)
        return super().forward(input_ids=input_ids, **kwargs)


def timed(folder: Any, *seconds: tuple[int, float], **options: Any) -> Any:
    model = peaked(Timed(*seconds))
    owner = trainer(folder, model, prompts_only, generation_max_length=2, **options)
    joined(owner).clock = lambda: TALLY.seconds
    return owner


def test_slower_joined_batches_are_not_used_unless_no_clock_decides(tmp_path: Any) -> None:
    data = samples(36)
    by_clock = timed(tmp_path, (3, 1.0), (99, 2.0))
    by_clock.predict(data)
    assert joined(by_clock).reason == "joined batches take 1.0 x as long"
    faster = timed(tmp_path, (3, 1.0), (99, 1.5))
    faster.predict(data)
    assert joined(faster)._is_on and joined(faster)._made >= 1
    deterministic = timed(tmp_path, (3, 1.0), (99, 9.0), full_determinism=True)
    deterministic.predict(data)
    assert joined(deterministic)._is_on and joined(deterministic)._made >= 1


def test_larger_batches_that_are_slower_are_not_used_again(tmp_path: Any) -> None:
    """The first two batches together are fast, all others together are not."""
    data = samples(45)
    off = trainer(tmp_path, peaked(Llama()), prompts_only, generation_max_length=2, speed="off").predict(data)
    owner = timed(tmp_path, (3, 1.0), (12, 1.0), (99, 20.0))
    for _ in range(2):
        np.testing.assert_array_equal(owner.predict(data).predictions, off.predictions)
        assert joined(owner)._made == 1 and joined(owner).reason == "joined batches take 1.5 x as long"


class Small(Llama):
    """A model on a device with memory for twelve rows."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        if len(input_ids) > 12:
            raise torch.OutOfMemoryError("tried to allocate 1 GiB")
        return super().forward(input_ids=input_ids, **kwargs)


def test_smaller_batches_after_running_out_of_memory(tmp_path: Any) -> None:
    off, on, owner = both(tmp_path, lambda: peaked(Small()), causal, samples(40))
    assert_same(off, on)
    assert joined(owner)._is_on and joined(owner)._budget < 1000


def test_an_error_of_joined_batches_only_keeps_the_collators(tmp_path: Any) -> None:
    class Narrow(Llama):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            if len(input_ids) > 3:
                raise ValueError("at most 3 rows")
            return super().forward(input_ids=input_ids, **kwargs)

    off, on, owner = both(tmp_path, lambda: peaked(Narrow()), causal, samples(40))
    assert_same(off, on)
    assert joined(owner).reason == "ValueError: at most 3 rows"


def test_an_error_of_the_users_batch_is_raised(tmp_path: Any) -> None:
    data = samples(40)
    data[30]["prompt"] = [WORDS + 5]
    with pytest.raises(IndexError, match="out of range"):
        trainer(tmp_path, peaked(Llama()), prompts_only, speed="max").predict(data)


# ---- rows -----------------------------------------------------------------------------------------------------------


def rows_of(*prompts: list[list[int]], left: bool) -> list[dict[str, Any]]:
    return [
        {"input_ids": padded(each, PAD, left), "attention_mask": padded([[1] * len(r) for r in each], 0, left)}
        for each in prompts
    ]


@pytest.mark.parametrize("left", [False, True])
def test_rows_are_padded_on_the_side_of_the_batches(left: bool) -> None:
    rows = JoinedRows(rows_of([[5, 6, 7], [8]], [[9, 3]], left=left), pad=PAD)
    assert rows.lengths == [3, 1, 2]
    picked = rows.pick([1, 2])
    expected = [[PAD, 8], [9, 3]] if left else [[8, PAD], [9, 3]]
    assert picked["input_ids"].tolist() == expected
    assert picked["attention_mask"].tolist() == [[int(token > 0) for token in row] for row in expected]
    assert rows.grouped(extra=1, copies=1, budget=6) == [[1, 2], [0]]
    assert rows.grouped(extra=1, copies=2, budget=6) == [[1], [2], [0]]


@pytest.mark.parametrize("left", [False, True])
def test_rows_of_batches_without_padding_are_padded_on_the_given_side(left: bool) -> None:
    rows = JoinedRows(rows_of([[5, 6, 7]], [[9, 3]], left=left), pad=PAD, left=left)
    assert rows.pick([1, 0])["input_ids"].tolist() == ([[PAD, 9, 3], [5, 6, 7]] if left else [[9, 3, PAD], [5, 6, 7]])
    wider = JoinedRows(rows_of([[5, 6]], [[9, 3]], left=left), pad=PAD, left=left, wider=1)
    assert wider.could_be_wider
    assert wider.pick([0])["attention_mask"].tolist() == ([[0, 1, 1]] if left else [[1, 1, 0]])


def test_results_are_put_back() -> None:
    rows = JoinedRows(rows_of([[5, 6, 7], [8]], [[9, 3]], left=True), pad=PAD)
    results = [torch.tensor([[4, END, PAD], [5, 6, END]]), torch.tensor([[7, END]])]
    first, second = rows.in_order([1, 2, 0], results, lengths_of_results([END], 0), PAD)
    assert first.tolist() == [[7, END], [4, END]]
    assert second.tolist() == [[5, 6, END]]


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        ([{"input_ids": torch.ones(2, 3)}, {"input_ids": torch.ones(2, 4)}], "no attention_mask"),
        ([{"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 0, 1]])}], "holes"),
        ([{"pixels": torch.ones(2, 3, 4)}, {"pixels": torch.ones(2, 3, 5)}], "no attention_mask|differ"),
        ([{"input_ids": torch.ones(2, 3), "patches": torch.ones(7, 2)}], "one row per sample"),
        ([{"input_ids": torch.ones(2, 3), "names": ["a", "b"]}], "not a tensor"),
        ([{"input_ids": torch.ones(2, 3), "decoder_input_ids": torch.ones(2, 1)}], "begin with decoder_input_ids"),
        ([{"input_ids": torch.ones(2, 3)}, {"tokens": torch.ones(2, 3)}], "different entries|no attention_mask"),
    ],
)
def test_batches_that_cannot_be_joined(batches: list[Any], reason: str) -> None:
    with pytest.raises(CannotJoin, match=reason):
        JoinedRows(batches, pad=PAD)


def test_inputs_without_tokens_are_joined_as_they_are() -> None:
    rows = JoinedRows([{"sound": torch.arange(12.0).view(2, 2, 3)}, {"sound": torch.zeros(1, 2, 3)}], pad=PAD)
    assert rows.pick([2, 0])["sound"].tolist() == [[[0] * 3] * 2, [[0, 1, 2], [3, 4, 5]]]


def test_whisper_is_joined(tmp_path: Any) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "init_std": 0.5}  # fmt: skip
    tokens = {"vocab_size": WORDS, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": START,
              "decoder_start_token_id": START, "suppress_tokens": None, "begin_suppress_tokens": None}  # fmt: skip
    config = transformers.WhisperConfig(
        **sizes, **tokens, num_mel_bins=4, max_source_positions=8, max_target_positions=16
    )
    model = transformers.WhisperForConditionalGeneration(config)
    data = [{"input_features": torch.randn(4, 16), "labels": torch.tensor([5, END])} for _ in range(24)]
    off = trainer(tmp_path, model, None, speed="off", per_device_eval_batch_size=2).predict(data)
    owner = trainer(tmp_path, model, None, speed="max", per_device_eval_batch_size=2)
    assert_same(off, owner.predict(data))
    assert joined(owner).reason is None and joined(owner)._made >= 1


class Doubled(Seq2SeqTrainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 2, outputs) if return_outputs else outputs.loss * 2


def test_an_overridden_loss_is_computed_on_the_collators_batches(tmp_path: Any) -> None:
    data = samples(24)
    off = trainer(tmp_path, T5(), pairs, cls=Doubled, speed="off").predict(data)
    owner = trainer(tmp_path, T5(), pairs, cls=Doubled, speed="max")
    assert_same(off, owner.predict(data))
    assert joined(owner)._is_on
