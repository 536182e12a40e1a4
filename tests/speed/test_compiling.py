"""Compiled blocks: few compilations, no prefix in names, a line for whatever falls back or compiles too often."""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import loopwright
from loopwright.notices import Notices
from loopwright.speed.compile import cache as compile_cache
from loopwright.speed.compile.blocks import as_written, compile_blocks, have_equal_numbers, repeated_blocks
from loopwright.speed.compile.cache import (
    cache_file,
    cache_key,
    is_cached,
    load_compile_cache,
    save_compile_cache,
)
from loopwright.speed.compile.recompiles import plain_reason
from loopwright.speed.user_cache import key_file
from tests import models
from tests.models import samples, trainer_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs the graph as it is and counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph


class Block(nn.Module):
    def __init__(self, index: int, width: int = 4) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Scaled(Block):
    """Differs from its sisters in a number that enters the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) / (self.index + 1.5)


class Stack(nn.Module):
    def __init__(self, *kinds: type[Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(index) for index, kind in enumerate(kinds))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(model: nn.Module, backend: Any = None, notices: Any = None, **options: Any) -> Any:
    session = compile_blocks(model, backend=backend or Counting(), notices=notices or Notices(quiet=True), **options)
    return session


def some(rows: int) -> Tensor:
    """An input as an embedding makes it: one that does not ask for a gradient is another variant of the first block."""
    return torch.ones(rows, 4, requires_grad=True)


def llama(layers: int) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


# ---- how often ------------------------------------------------------------------------------------------------------


def test_twelve_blocks_of_a_llama_are_one_compilation_for_all_lengths() -> None:
    model, backend = llama(12), Counting()
    session = compiled(model, backend, dynamic=True)
    # 8 is also the size of a head: it must not be taken for the number of tokens.
    for rows, length in ((2, 8), (2, 9), (3, 12), (2, 16), (4, 31)):
        ids = torch.randint(0, 13, (rows, length))
        model(input_ids=ids, labels=ids).loss.backward()
    session.finish()
    assert (backend.graphs, session.counter.compilations, session.counter.count) == (1, 1, 0)
    assert session.fell_back == {}


def test_blocks_that_differ_in_a_number_are_all_compiled() -> None:
    """More variants than torch's own limit of 8, beyond which it goes on without compiling."""
    model, backend = Stack(*[Scaled] * 12), Counting()
    expected = model(some(2))
    session = compiled(model, backend, dynamic=True)
    for rows in (2, 3, 5):
        model(some(rows)).sum().backward()
    assert torch.equal(model(some(2)), expected)
    session.finish()
    assert backend.graphs == 12


def test_torchs_settings_are_put_back() -> None:
    import torch._functorch.config
    import torch.fx.experimental._config

    def settings() -> list[Any]:
        dynamo = torch._dynamo.config
        return [
            dynamo.recompile_limit, dynamo.accumulated_recompile_limit,
            torch._functorch.config.force_non_lazy_backward_lowering, torch.fx.experimental._config.use_duck_shape,
        ]  # fmt: skip

    before = settings()
    session = compiled(Stack(Block, Block))
    assert settings() != before
    session.finish(), session.finish()
    assert settings() == before


def test_shapes_one_by_one_or_all_at_once() -> None:
    found = {}
    for dynamic in (True, False, None):
        torch._dynamo.reset()
        model, backend = Stack(Block, Block), Counting()
        session = compiled(model, backend, dynamic=dynamic)
        for rows in (2, 3, 4, 5):
            model(some(rows)).sum().backward()
        session.finish()
        found[dynamic] = backend.graphs
        assert session.counter.count == backend.graphs - 1
    assert found == {True: 1, False: 4, None: 2}


def test_the_reason_of_a_recompilation_is_kept() -> None:
    model = Stack(Block, Block)
    session = compiled(model, dynamic=False)
    model(some(2)), model(some(3))
    session.finish()
    figures = session.figures()
    assert (figures["blocks"], figures["compilations"], figures["recompilations"]) == (2, 2, 1)
    assert "Block.forward: tensor 'x' size mismatch at index 0. expected 2, actual 3" in figures["reasons"][0]


def test_what_was_compiled_before_or_after_is_not_counted() -> None:
    model = Stack(Block, Block)
    first = compiled(model, dynamic=False)
    model(some(2))
    first.finish()
    second = compiled(model, dynamic=False)
    model(some(3))
    second.finish()
    model(some(4))
    assert (first.counter.compilations, second.counter.compilations, second.counter.count) == (1, 1, 0)


def test_too_many_recompilations_are_told_once_or_raise() -> None:
    for strict in (False, True):
        torch._dynamo.reset()
        model, notices = Stack(Block, Block), Notices(strict=strict, quiet=True)
        session = compiled(model, notices=notices, dynamic=False, max_recompiles=1)
        model(some(2)), model(some(3))
        assert notices.told == []
        if strict:
            with pytest.raises(loopwright.LoopwrightError, match=r"max_recompiles=1; .*'x' size mismatch.*strict"):
                model(some(4))
        else:
            for rows in (4, 5, 6):
                model(some(rows))
            assert len(notices.told) == 1 and "expected 3, actual 4" in notices.told[0]
        session.finish()


def test_reaching_torchs_limit_is_told() -> None:
    model, notices = Stack(Block, Block), Notices(quiet=True)
    session = compiled(model, notices=notices, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        for rows in range(2, 8):
            model(some(rows))
    session.finish()
    assert len(notices.told) == 1 and "Block.forward has 3 compiled variants" in notices.told[0]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("0/1: tensor 'x' size mismatch at index 0. expected 2, actual 3", None),
        ("3/12: a == False        # if not a:  # some/file.py:3 in f", "a == False"),
        ("0/0: GLOBAL_STATE changed: grad_mode ", "GLOBAL_STATE changed: grad_mode"),
        ("no number", "no number"),
    ],
)
def test_reasons_are_one_plain_line(text: str, plain: str | None) -> None:
    assert plain_reason(text) == (plain or text.partition(": ")[2])


# ---- names, copies, resuming ----------------------------------------------------------------------------------------


def test_names_never_carry_a_prefix_and_copies_are_their_own(tmp_path: Any) -> None:
    model = Stack(Block, Block)
    keys = list(model.state_dict())
    session = compiled(model)
    model(some(2))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.layers[0].linear.weight.zero_()
    session.finish()
    for each in (model, twin):
        assert list(each.state_dict()) == keys
        assert not any("_orig_mod" in name for name, _ in [*each.named_modules(), *each.named_parameters()])
    assert not torch.equal(model(some(2)), twin(some(2)))


def test_a_compiled_run_saves_plain_names_and_resumes_compiled_or_not(tmp_path: Any) -> None:
    from safetensors import safe_open

    def trainer(folder: str, **options: Any) -> Any:
        options = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps", **options}
        return trainer_of(
            models.llama(), samples((6, 7, 8, 9)), tmp_path / folder, per_device_train_batch_size=1, **options
        )

    whole = trainer("a", torch_compile_backend="eager")
    whole.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert not [key for key in file.keys() if "_orig_mod" in key]
    for options in ({"torch_compile_backend": "eager"}, {}):
        rest = trainer("b" + str(len(options)), **options)
        rest.train(resume_from_checkpoint=str(checkpoint))
        for mine, theirs in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_whole_model_is_compiled_by_name() -> None:
    model, backend, notices = Stack(Block, Block), Counting(), Notices(strict=True)
    session = compiled(model, backend, notices, scope="model")
    keys = list(model.state_dict())
    model(some(2))
    session.finish()
    assert backend.graphs == 1 and session.figures()["blocks"] == 1
    assert model._compiled_call_impl is not None and model.layers[0]._compiled_call_impl is None
    assert list(model.state_dict()) == keys


def test_a_model_without_blocks_is_compiled_whole_and_says_so() -> None:
    notices = Notices(quiet=True)
    session = compiled(nn.Linear(2, 2), notices=notices)
    session.finish()
    assert "no repeated blocks" in notices.told[0]


def test_the_mask_of_a_llama_stays_outside() -> None:
    """Compiled as a whole, a model builds a dense mask; block by block attention is called causal, without one."""
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.kwargs) for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        return graph

    model = llama(2)
    session = compiled(model, backend, dynamic=True)
    ids = torch.randint(0, 13, (2, 6))
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    session.finish()
    assert len(seen) == 1
    assert "'attn_mask': None" in seen[0] and "'is_causal': True" in seen[0]


# ---- falling back ---------------------------------------------------------------------------------------------------


class Odd(Block):
    """A block of a class of its own, so that a backend can tell it from the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.linear(x))


def refusing(word: str) -> Any:
    def backend(graph: Any, inputs: Any) -> Any:
        if any(word in str(node.target) for node in graph.graph.nodes):
            raise RuntimeError(f"no kernel for {word}\nand more lines")
        return graph

    return backend


def test_a_block_that_does_not_compile_runs_as_it_is_and_is_named() -> None:
    model = nn.ModuleDict({"a": Stack(Block, Block), "b": Stack(Odd, Odd)})
    x = some(2)
    expected = model["b"](model["a"](x))
    notices = Notices(quiet=True)
    session = compiled(model, refusing("sin"), notices)
    for _ in range(3):
        assert torch.equal(model["b"](model["a"](x)), expected)
    session.finish()
    assert list(session.fell_back) == ["b.layers.0", "b.layers.1"]
    assert len(notices.told) == 2
    assert all("(Odd) could not be compiled and runs eagerly: " in text and "no kernel for sin" in text
               and "\n" not in text for text in notices.told)  # fmt: skip
    assert model["a"].layers[0]._compiled_call_impl is not None and model["b"].layers[0]._compiled_call_impl is None


def test_one_bad_block_among_good_ones_is_the_only_one_left_out() -> None:
    class Choosy(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return torch.sin(x) if self.index == 1 else x

    model, notices = Stack(*[Choosy] * 4), Notices(quiet=True)
    expected = model(some(2))
    session = compiled(model, refusing("sin"), notices)
    assert torch.equal(model(some(2)), expected)
    session.finish()
    assert list(session.fell_back) == ["layers.1"] and len(notices.told) == 1 and "layers.1" in notices.told[0]


def test_two_failures_speak_for_the_rest_of_a_class() -> None:
    model, notices, tried = Stack(*[Odd] * 6), Notices(quiet=True), []
    refuse = refusing("sin")
    session = compiled(model, lambda graph, inputs: (tried.append(1), refuse(graph, inputs))[1], notices)
    model(some(2))
    session.finish()
    assert len(tried) == 2 and len(session.fell_back) == 6
    assert "layers.1 (Odd), and the 4 others of its class, could not" in notices.told[1]


def test_a_backward_that_does_not_compile_falls_back_in_the_forward() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def no_backward(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no backward")

    model, notices = Stack(Block, Block), Notices(quiet=True)
    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=no_backward)
    session = compiled(model, backend, notices, dynamic=True)
    model(some(2)).sum().backward()
    session.finish()
    assert list(session.fell_back) == ["layers.0", "layers.1"]
    assert model.layers[0].linear.weight.grad is not None


def test_an_error_of_the_model_itself_is_the_models() -> None:
    model, notices = Stack(Block, Block), Notices(quiet=True)
    session = compiled(model, notices=notices)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.ones(2, 5))
    session.finish()
    assert type(caught.value) is RuntimeError
    assert notices.told == [] and session.fell_back == {}


def test_falling_back_is_an_error_in_strict_mode() -> None:
    model = Stack(Odd, Odd)
    session = compiled(model, refusing("sin"), Notices(strict=True))
    with pytest.raises(loopwright.LoopwrightError, match=r"layers.0 \(Odd\) could not be compiled"):
        model(some(2))
    session.finish()


# ---- the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, Any]:
    """What torch would hand out and was handed back: making real ones takes a C++ compiler and half a minute."""
    kept: dict[str, Any] = {"given": (b"machine code", None), "loaded": []}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: kept["given"])
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: kept["loaded"].append(data) or "info")
    return kept


def test_what_was_compiled_comes_back(artifacts: Any) -> None:
    assert load_compile_cache("a") is False and not is_cached("a")
    path = save_compile_cache("a")
    assert path == cache_file("a") and [each.name for each in path.parent.iterdir()] == [path.name]
    assert load_compile_cache("a") is True and is_cached("a") and artifacts["loaded"] == [b"machine code"]
    for each, mode in ((key_file(), 0o600), (path, 0o600), (path.parent, 0o700)):
        assert each.stat().st_mode & 0o777 == mode


def test_a_cache_from_elsewhere_is_never_read(artifacts: Any, tmp_path: Any, monkeypatch: Any, caplog: Any) -> None:
    path = save_compile_cache("a")
    good = path.read_bytes()
    for content in (good[:-1] + b"?", b"?" + good[1:], b"", good[:20], b"x" * 32 + b"code"):
        path.write_bytes(content)
        assert load_compile_cache("a") is False
    assert artifacts["loaded"] == []
    assert "was not written by this user" in caplog.text
    cache_file("b").write_bytes(good)
    os.chmod(cache_file("b"), 0o600)
    assert load_compile_cache("b") is False, "a file of another model"
    path.write_bytes(good)
    for place, mode in ((path, 0o666), (path.parent, 0o777)):
        before = place.stat().st_mode & 0o777
        os.chmod(place, mode)
        assert load_compile_cache("a") is False and "can be changed by, another user" in caplog.text
        os.chmod(place, before)
    assert artifacts["loaded"] == [] and load_compile_cache("a") is True
    artifacts["loaded"].clear()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert load_compile_cache("a") is False and artifacts["loaded"] == []
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "somebody else"))
    assert load_compile_cache("a") is False and artifacts["loaded"] == []


def test_a_folder_that_others_can_write_to_is_not_used(artifacts: Any, caplog: Any) -> None:
    cache_file("a").parent.mkdir(parents=True)
    os.chmod(cache_file("a").parent, 0o777)
    assert save_compile_cache("a") is None and "can be changed by, another user" in caplog.text


def test_nothing_to_keep(artifacts: Any) -> None:
    artifacts["given"] = None
    assert save_compile_cache("a") is None and not cache_file("a").parent.exists()


def test_old_files_are_removed(artifacts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(compile_cache, "MOST_FILES", 2)
    for time, key in enumerate("abc"):
        os.utime(save_compile_cache(key), (time, time))
    assert {path.stem for path in cache_file("a").parent.iterdir()} <= {"b", "c"}


def test_a_cache_that_cannot_be_kept_or_read_costs_nothing(artifacts: Any, monkeypatch: Any, caplog: Any) -> None:
    save_compile_cache("a")
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: 1 / 0)
    assert load_compile_cache("a") is False
    key_file().write_bytes(b"short")
    with caplog.at_level(logging.WARNING):
        assert save_compile_cache("a") is None
    assert "could not be read: ZeroDivisionError" in caplog.text and "could not be saved: ValueError" in caplog.text


def test_keys_differ_by_model_shapes_precision_and_device() -> None:
    class Other(Stack):
        pass

    wide = Stack(Block, Block)
    wide.layers[0] = Block(0, width=6)
    frozen = Stack(Block, Block)
    frozen.layers[0].linear.bias.requires_grad_(False)
    found = [cache_key(model, CPU, False) for model in (Stack(Block, Block), Other(Block, Block), wide, frozen)]
    found += [cache_key(Stack(Block, Block), CPU, True), cache_key(Stack(Block, Block), torch.device("meta"), False)]
    assert len(set(found)) == len(found) and cache_key(Stack(Block, Block), CPU, False) == found[0]


def test_a_run_keeps_its_code_outside_its_folder(artifacts: Any, tmp_path: Any) -> None:
    options = {"per_device_train_batch_size": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer_of(models.llama(), samples((6, 6, 6, 6)), tmp_path / "plain", **options).train()
    assert not (tmp_path / "home").exists()
    options["torch_compile_backend"] = "eager"
    trainer_of(models.llama(), samples((6, 6, 6, 6)), tmp_path / "run", **options).train()
    kept = list(cache_file("a").parent.glob("*.bin"))
    assert len(kept) == 1 and artifacts["loaded"] == []
    assert not list((tmp_path / "run").rglob("*.bin")) and not (tmp_path / "run" / "compile_cache").exists()
    # A file in the run's folder, or in a checkpoint, is not looked at.
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        (folder / "compile_cache").mkdir()
        (folder / "compile_cache" / kept[0].name).write_bytes(kept[0].read_bytes())
    kept[0].unlink()
    trainer_of(models.llama(), samples((6, 6, 6, 6)), tmp_path / "run", **options).train(resume_from_checkpoint=True)
    assert artifacts["loaded"] == []
    torch._dynamo.reset()
    trainer_of(models.llama(), samples((6, 6, 6, 6)), tmp_path / "again", **options).train()
    trainer_of(models.llama(), samples((6, 6, 6, 6)), tmp_path / "more", **options).train()
    assert artifacts["loaded"] and set(artifacts["loaded"]) == {b"machine code"}


def test_a_decoder_with_a_config_of_its_own_returns_no_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=9)
    model = transformers.T5ForConditionalGeneration(config)
    loopwright.Trainer(model, loopwright.TrainingArguments("run", use_cpu=True))
    assert [module.config.use_cache for module in (model, model.encoder, model.decoder)] == [False] * 3
    assert len(repeated_blocks(model)) == 4


class Factor(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.linear = scale, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def traced(scales: list[float]) -> tuple[int, int]:
    """How often blocks with these scales were traced, and how many graphs came of it."""
    torch._dynamo.reset()
    tries: list[Any] = []
    model = nn.Sequential(nn.ModuleList(Factor(scale) for scale in scales))
    session = compile_blocks(model, backend=lambda graph, inputs: tries.append(graph) or graph, dynamic=True,
                             notices=Notices())  # fmt: skip
    x = torch.ones(3, 4, requires_grad=True)
    for block in model[0]:
        x = block(x)
    session.finish()
    return len(tries), session.counter.compilations


def test_numbers_that_blocks_have_in_common_are_constants() -> None:
    assert have_equal_numbers([Factor(0.5), Factor(0.5)]) and not have_equal_numbers([Factor(0.5), Factor(0.7)])
    assert not have_equal_numbers([])
    assert traced([0.5] * 4) == (1, 1)
    graphs, compilations = traced([0.5, 0.6, 0.7, 0.8])  # as unknowns they are one graph, or few
    assert graphs <= 2 and compilations <= 2


def test_what_is_only_tried_runs_as_it_is_written() -> None:
    model = nn.Sequential(nn.ModuleList(Factor(0.5) for _ in range(2)))
    session = compile_blocks(model, backend="eager", notices=Notices())
    with pytest.raises(ZeroDivisionError), as_written(model):
        assert all(block._compiled_call_impl is None for block in model[0])
        model[0][0](torch.ones(3, 4))
        raise ZeroDivisionError
    assert session.counter.compilations == 0
    assert [block._compiled_call_impl for block in model[0]] == session.calls
    session.finish()
