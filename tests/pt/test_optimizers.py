"""Optimizers by name, the decay groups, loopwright's own Adafactor and Muon, and the error if one is missing."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from loopwright import TrainingArguments  # noqa: E402
from loopwright.errors import ArgumentsError, MissingPackage, ModelError  # noqa: E402
from loopwright.pt.optim.optimizers import (  # noqa: E402
    OPTIMIZERS,
    Adafactor,
    Muon,
    build_optimizer,
    decay_parameter_names,
    optimizer_class_and_kwargs,
    parameter_groups,
    parse_optim_args,
    register_optimizer,
    table,
)
from loopwright.pt.optim.optimizers.muon import hidden_matrices, orthogonalize  # noqa: E402

TORCH_ONLY = ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor", "muon"]


def arguments(optim="adamw_torch", **changes):
    defaults = {
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-8,
        "optim_args": None,
        "optim_target_modules": None,
        "warmup_steps": 0,
    }
    return SimpleNamespace(optim=optim, **defaults | changes)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, tokens):
        hidden = torch.relu(self.first(self.embed(tokens)))
        return self.out(torch.relu(self.second(self.norm(hidden))))


def mlp(seed=0):
    torch.manual_seed(seed)
    return Mlp()


TOKENS = torch.arange(11)
LABELS = TOKENS % 3


def loss_of(model):
    return nn.functional.cross_entropy(model(TOKENS), LABELS)


def train(model, optimizer, updates):
    losses = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tiny_transformers():
    transformers = pytest.importorskip("transformers")
    small = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    t5 = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    gpt2 = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)),
        "qwen3": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small, head_dim=4, num_key_value_heads=2)),
        "bert": transformers.BertForSequenceClassification(transformers.BertConfig(**small)),
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        "t5": transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)),
    }


MODELS = ["llama", "qwen3", "bert", "gpt2", "t5"]


@pytest.fixture(scope="module")
def models():
    return tiny_transformers()


# ------------------------------------------------------------------------------------------------ the table


def test_every_name_of_transformers_has_a_row():
    from transformers.training_args import OptimizerNames

    assert {name.value for name in OptimizerNames} | {"muon", "adamw_apex_fused", "adamw_hf"} == set(OPTIMIZERS)


def test_every_row_has_a_line_of_help():
    assert all(row.help for row in OPTIMIZERS.values())


@pytest.mark.parametrize("name", TORCH_ONLY + ["adamw_hf"])
def test_torch_only_optimizers_train_without_another_package(name):
    model = mlp()
    optimizer = build_optimizer(model, arguments(name, learning_rate=0.02))
    losses = train(model, optimizer, 40)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", sorted(name for name, row in OPTIMIZERS.items() if row.needs))
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setattr(table, "find_spec", lambda module: None)
    with pytest.raises(MissingPackage) as caught:
        optimizer_class_and_kwargs(arguments(name, optim_target_modules=["first"]), mlp())
    assert OPTIMIZERS[name].needs in str(caught.value)
    assert f"optim='{name}'" in str(caught.value)
    assert "pip install" in str(caught.value)


@pytest.mark.parametrize("name", sorted(name for name in OPTIMIZERS if "layerwise" in name or "lomo" in name))
def test_what_updates_in_the_backward_is_refused_with_the_reason_and_what_to_use(name):
    said = rf"optim='{name}' updates each weight during the backward pass: .* Use optim='\w+' instead"
    for given in (lambda: TrainingArguments("run", optim=name, use_cpu=True),
                  lambda: build_optimizer(mlp(), arguments(name))):  # fmt: skip
        with pytest.raises(ArgumentsError, match=said) as caught:
            given()
        assert len(caught.value.problems) == 1


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ArgumentsError, match="Did you mean 'adamw_torch'"):
        optimizer_class_and_kwargs(arguments("adamw_torc"))


SAME_AS_TRANSFORMERS = [
    ("adamw_torch", None),
    ("adamw_torch_fused", None),
    ("sgd", None),
    ("sgd", "momentum=0.9,nesterov=True"),
    ("adagrad", "lr_decay=0.1,eps=1e-6"),
    ("rmsprop", "alpha=0.9,centered=true,momentum=0.1"),
]


@pytest.mark.parametrize(("name", "options"), SAME_AS_TRANSFORMERS)
def test_class_and_kwargs_equal_transformers(name, options):
    transformers = pytest.importorskip("transformers")
    args = arguments(name, optim_args=options)
    assert optimizer_class_and_kwargs(args) == transformers.Trainer.get_optimizer_cls_and_kwargs(args)


def test_adafactor_is_forced_to_the_outer_learning_rate():
    transformers = pytest.importorskip("transformers")
    args = arguments("adafactor")
    cls, kwargs = optimizer_class_and_kwargs(args)
    assert (cls, kwargs) == (Adafactor, transformers.Trainer.get_optimizer_cls_and_kwargs(args)[1])


def test_an_optimizer_can_be_registered_from_outside(monkeypatch):
    monkeypatch.setattr(table, "OPTIMIZERS", dict(OPTIMIZERS))
    register_optimizer("mine", lambda args, model: (torch.optim.Adamax, {"lr": args.learning_rate, **args.options}))
    optimizer = build_optimizer(mlp(), arguments("mine", optim_args="eps=1e-5"))
    assert isinstance(optimizer, torch.optim.Adamax)
    assert optimizer.defaults["eps"] == 1e-5


def test_names_may_be_enums():
    from transformers.training_args import OptimizerNames

    assert optimizer_class_and_kwargs(arguments(OptimizerNames.SGD))[0] is torch.optim.SGD


def test_fused_falls_back_and_says_so_where_the_device_cannot():
    said = []
    model = mlp().to("meta")
    cls, kwargs = optimizer_class_and_kwargs(arguments("adamw_torch_fused"), model, tell=said.append)
    assert "fused" not in kwargs
    assert "using adamw_torch" in said[0]


def test_fused_is_used_where_the_device_can():
    assert build_optimizer(mlp(), arguments("adamw_torch_fused")).defaults["fused"] is True


def test_adamw_hf_says_what_is_used():
    said = []
    build_optimizer(mlp(), arguments("adamw_hf"), tell=said.append)
    assert "adamw_torch" in said[0]


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (None, {}),
        ("", {}),
        ("a=1", {"a": 1}),
        ("a=1.0, b=False ,c=true", {"a": 1.0, "b": False, "c": True}),
        ("betas=(0.9,0.95),rank=8", {"betas": (0.9, 0.95), "rank": 8}),
        ("a=none,b=std,c=1e-3,d=[1,2]", {"a": None, "b": "std", "c": 1e-3, "d": (1, 2)}),
        ({"a": "False", "b": 3, "c": [1]}, {"a": False, "b": 3, "c": [1]}),
    ],
)
def test_optim_args_are_typed(text, parsed):
    result = parse_optim_args(text)
    assert result == parsed
    assert [type(value) for value in result.values()] == [type(value) for value in parsed.values()]


@pytest.mark.parametrize("text", ["momentum", "=3", "momentum:0.9"])
def test_optim_args_without_a_value_are_refused(text):
    with pytest.raises(ArgumentsError, match="name=value"):
        parse_optim_args(text)


def test_unknown_options_are_listed_with_the_accepted_ones():
    with pytest.raises(ArgumentsError, match="momentum, dampening"):
        optimizer_class_and_kwargs(arguments("sgd", optim_args="momentun=0.9"))


@pytest.mark.parametrize("value", ["maybe", "2", "(1,2)"])
def test_an_option_of_the_wrong_type_is_refused_with_its_value(value):
    with pytest.raises(ArgumentsError, match="nesterov in optim_args must be true or false"):
        optimizer_class_and_kwargs(arguments("sgd", optim_args=f"nesterov={value}"))


def test_weight_decay_in_optim_args_takes_effect():
    optimizer = build_optimizer(mlp(), arguments("sgd", optim_args="weight_decay=0.3"))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


# ------------------------------------------------------------------------------------------------ packages

OPTIMIZER_STAND_IN = """
import torch
class {name}(torch.optim.SGD):
    def __init__(self, params, lr=1e-3, {signature}):
        self.seen = {{key: value for key, value in locals().items() if key not in ("self", "params", "__class__")}}
        super().__init__(params, lr=lr)
"""
BNB_COMMON = "weight_decay=1e-2, optim_bits=32, args=None, min_8bit_size=4096"
STAND_INS = {
    "bitsandbytes/optim/__init__.py": {
        "AdamW": f"betas=(.9, .999), eps=1e-8, amsgrad=False, is_paged=False, {BNB_COMMON}",
        "Lion": f"betas=(.9, .99), is_paged=False, {BNB_COMMON}",
        "RMSprop": f"alpha=.99, eps=1e-8, momentum=0, centered=False, {BNB_COMMON}",
        "AdEMAMix": "betas=(.9, .999, .9999), alpha=5., t_alpha=None, t_beta3=None, eps=1e-8, is_paged=False, "
        + BNB_COMMON,
    },
    "torchao/optim/__init__.py": dict.fromkeys(
        ("AdamW4bit", "AdamW8bit"),
        "betas=(.9, .999), eps=1e-8, weight_decay=0., amsgrad=False, *, block_size=1, bf16_stochastic_round=False",
    ),
    "galore_torch/__init__.py": {
        "GaLoreAdamW": "betas=(.9, .999), eps=1e-6, weight_decay=0., correct_bias=True",
        "GaLoreAdamW8bit": "betas=(.9, .999), eps=1e-6, weight_decay=0.",
        "GaLoreAdafactor": "eps=(1e-30, 1e-3), scale_parameter=True, relative_step=True",
    },
    "apollo_torch/__init__.py": {"APOLLOAdamW": "betas=(.9, .999), eps=1e-6, weight_decay=0."},
    "grokadamw/__init__.py": {
        "GrokAdamW": "betas=(.9, .999), eps=1e-8, weight_decay=1e-2, alpha_init=.98, lamb=2., gamma=.1, "
        "grokking_signal_fns=None, grokking_signal_decay_rate=.1, gradient_clipping=1."
    },
    "schedulefree/__init__.py": {
        "AdamWScheduleFree": "betas=(.9, .999), eps=1e-8, weight_decay=0, warmup_steps=0, r=0., weight_lr_power=2.",
        "RAdamScheduleFree": "betas=(.9, .999), eps=1e-8, weight_decay=0, r=0., weight_lr_power=2.",
        "SGDScheduleFree": "momentum=.9, weight_decay=0, warmup_steps=0, r=0., weight_lr_power=2.",
    },
    "optimi/__init__.py": {
        "StableAdamW": "betas=(.9, .99), weight_decay=0, eps=1e-6, decouple_lr=False, max_lr=None, kahan_sum=None"
    },
    "torchdistx/optimizers/__init__.py": {
        "AnyPrecisionAdamW": "betas=(.9, .999), eps=1e-8, weight_decay=0., use_kahan_summation=False, "
        "momentum_dtype=None, variance_dtype=None, compensation_buffer_dtype=None"
    },
    "torch_xla/amp/syncfree/__init__.py": {"AdamW": "betas=(.9, .999), eps=1e-8, weight_decay=0."},
    "torch_npu/optim/__init__.py": {"NpuFusedAdamW": "betas=(.9, .999), eps=1e-8, weight_decay=0."},
    "apex/optimizers/__init__.py": {"FusedAdam": "betas=(.9, .999), eps=1e-8, weight_decay=0."},
}
MANAGER = """
class GlobalOptimManager:
    overrides = []
    @classmethod
    def get_instance(cls):
        return cls
    @classmethod
    def register_module_override(cls, module, name, options):
        cls.overrides.append((module, name, options))
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Packages with the signatures of the real ones, which keep what they were given."""
    import sys

    for file, classes in STAND_INS.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        for parent in path.relative_to(tmp_path).parents:
            (tmp_path / parent / "__init__.py").touch()
        text = "".join(OPTIMIZER_STAND_IN.format(name=name, signature=sign) for name, sign in classes.items())
        path.write_text(text + (MANAGER if "bitsandbytes" in file else ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    tops = {file.split("/")[0] for file in STAND_INS}
    for module in [name for name in sys.modules if name.split(".")[0] in tops]:
        monkeypatch.delitem(sys.modules, module)
    yield
    for module in [name for name in sys.modules if name.split(".")[0] in tops]:
        del sys.modules[module]


@pytest.mark.parametrize("name", sorted(name for name, row in OPTIMIZERS.items() if row.needs))
def test_packaged_optimizers_are_built_through_their_own_signature(stand_ins, name):
    model = mlp()
    optimizer = build_optimizer(model, arguments(name, optim_target_modules=["first", "second"]), total_updates=100)
    assert optimizer.seen["lr"] == 1e-3
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(dict(model.named_parameters())[n]) for n in decay_parameter_names(model)}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("adamw_torch_8bit", "block_size=128,bf16_stochastic_round=False", {"block_size": 128}),
        ("adamw_torch_4bit", None, {"block_size": 256, "bf16_stochastic_round": False}),
        ("stable_adamw", "decouple_lr=False,kahan_sum=False", {"decouple_lr": False, "kahan_sum": False}),
        ("stable_adamw", "kahan_sum=True,max_lr=0.1", {"kahan_sum": True, "max_lr": 0.1}),
        ("rmsprop_bnb_8bit", "alpha=0.9,centered=False", {"alpha": 0.9, "centered": False, "optim_bits": 8}),
        ("paged_ademamix_32bit", "beta3=0.9,t_alpha=5", {"betas": (0.9, 0.98, 0.9), "t_alpha": 5, "is_paged": True}),
        ("lion_8bit", None, {"betas": (0.9, 0.98), "optim_bits": 8, "is_paged": False}),
        ("grokadamw", "lamb=3", {"lamb": 3.0, "betas": (0.9, 0.98)}),
        ("adamw_anyprecision", "momentum_dtype=bfloat16", {"momentum_dtype": torch.bfloat16}),
    ],
)
def test_options_of_packaged_optimizers_arrive_with_their_types(stand_ins, name, options, expected):
    seen = build_optimizer(mlp(), arguments(name, optim_args=options)).seen
    assert {key: seen[key] for key in expected} == expected
    assert [type(seen[key]) for key in expected] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(("warmup", "expected"), [(0.1, 10), (7, 7), (0, 0)])
def test_schedule_free_warms_up_in_updates_not_in_shares(stand_ins, warmup, expected):
    def get_warmup_steps(total):
        return int(warmup) if warmup >= 1 else round(total * warmup)

    args = arguments("schedule_free_adamw", warmup_steps=warmup, get_warmup_steps=get_warmup_steps)
    seen = build_optimizer(mlp(), args, total_updates=100).seen
    assert (seen["warmup_steps"], type(seen["warmup_steps"])) == (expected, int)


def test_a_share_of_a_run_of_unknown_length_is_refused(stand_ins):
    with pytest.raises(ArgumentsError, match="warmup_steps=0.1"):
        build_optimizer(mlp(), arguments("schedule_free_sgd", warmup_steps=0.1))


def test_8_bit_bitsandbytes_keeps_embeddings_in_32_bit(stand_ins):
    model = mlp()
    build_optimizer(model, arguments("adamw_bnb_8bit"))
    import bitsandbytes

    assert bitsandbytes.optim.GlobalOptimManager.overrides == [(model.embed, "weight", {"optim_bits": 32})]
    build_optimizer(model, arguments("paged_adamw_32bit"))
    assert len(bitsandbytes.optim.GlobalOptimManager.overrides) == 1


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw"])
def test_low_rank_optimizers_ask_for_targets(stand_ins, name):
    with pytest.raises(ArgumentsError, match="set optim_target_modules"):
        build_optimizer(mlp(), arguments(name))
    with pytest.raises(ArgumentsError, match="no linear layer"):
        build_optimizer(mlp(), arguments(name, optim_target_modules=["attention"]))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["second"], ["second"]),
        (r".*(first|out)", ["first", "out"]),
        ("all-linear", ["first", "second", "out"]),
        ("all_linear", ["first", "second", "out"]),
        ([r"fir.*"], ["first"]),
    ],
)
def test_targets_are_names_patterns_or_all_linear(stand_ins, targets, expected):
    model = mlp()
    optimizer = build_optimizer(model, arguments("galore_adamw", optim_target_modules=targets, optim_args="rank=4"))
    chosen = [id(p) for group in optimizer.param_groups if group.get("rank") == 4 for p in group["params"]]
    assert chosen == [id(model.get_submodule(name).weight) for name in expected]


def test_a_target_that_is_no_linear_layer_is_mentioned(stand_ins):
    said = []
    build_optimizer(mlp(), arguments("galore_adamw", optim_target_modules=["embed", "first"]), tell=said.append)
    assert len(said) == 1 and "embed" in said[0]


# ------------------------------------------------------------------------------------------------ decay


@pytest.mark.parametrize("name", MODELS)
def test_decayed_names_equal_transformers(models, name):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Trainer.get_decay_parameter_names(None, models[name])
    assert sorted(decay_parameter_names(models[name])) == sorted(theirs)


@pytest.mark.parametrize("name", MODELS)
def test_groups_equal_transformers_in_content_and_order(models, name, tmp_path):
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), weight_decay=0.1, use_cpu=True, report_to=[])
    theirs = transformers.Trainer(model=models[name], args=args).create_optimizer()
    ours = parameter_groups(models[name], args)
    assert [group["weight_decay"] for group in ours] == [0.1, 0.0]
    for our_group, their_group in zip(ours, theirs.param_groups, strict=True):
        assert [id(p) for p in our_group["params"]] == [id(p) for p in their_group["params"]]


def test_no_norm_decays_whatever_its_name_or_kind():
    class LlamaLikeRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    model = nn.ModuleDict(
        {
            "bn1": nn.BatchNorm2d(4),
            "gn": nn.GroupNorm(2, 4),
            "ln_f": LlamaLikeRMSNorm(),
            "rms": nn.RMSNorm(4),
            "inst": nn.InstanceNorm1d(4, affine=True),
            "conv": nn.Conv2d(4, 4, 1),
            "normalizer_free": nn.Linear(4, 4),
        }
    )
    assert decay_parameter_names(model) == ["conv.weight", "normalizer_free.weight"]


def test_frozen_parameters_are_in_no_group():
    model = mlp()
    model.first.requires_grad_(False)
    held = {id(p) for group in parameter_groups(model, arguments()) for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}


def test_a_users_choice_of_decayed_names_is_honoured():
    model = mlp()
    groups = build_optimizer(model, arguments(), decay_names=["norm.bias"]).param_groups
    assert [id(p) for p in groups[0]["params"]] == [id(model.norm.bias)]


# ------------------------------------------------------------------------------------------------ building


def test_nothing_to_train_is_an_error():
    with pytest.raises(ModelError, match="none of them requires a gradient"):
        build_optimizer(mlp().requires_grad_(False), arguments())


def test_a_class_and_kwargs_win_over_the_name():
    optimizer = build_optimizer(mlp(), arguments("sgd"), (torch.optim.Adam, {"lr": 0.5}))
    assert isinstance(optimizer, torch.optim.Adam)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


def test_weight_decay_in_the_users_kwargs_takes_effect():
    optimizer = build_optimizer(mlp(), arguments(), (torch.optim.AdamW, {"lr": 0.5, "weight_decay": 0.2}))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]


def test_a_factory_gets_the_model():
    class Factory:
        def __call__(self, model, lr):
            return torch.optim.SGD(model.out.parameters(), lr=lr)

    model = mlp()
    kwargs = {"lr": 0.5}
    optimizer = build_optimizer(model, arguments(), (Factory, kwargs))
    assert optimizer.param_groups[0]["params"][0] is model.out.weight
    assert kwargs == {"lr": 0.5}
    with pytest.raises(ArgumentsError, match="param_groups"):
        build_optimizer(model, arguments(), (lambda: lambda model: "nothing", {}))


@pytest.mark.parametrize("name", TORCH_ONLY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_survives_saving_bit_for_bit(name, dtype):
    options = {"sgd": "momentum=0.9", "adafactor": "beta1=0.9"}.get(name)
    args = arguments(name, optim_args=options, learning_rate=0.01)
    whole = mlp().to(dtype)
    reference = build_optimizer(whole, args)
    train(whole, reference, 3)
    file = io.BytesIO()
    torch.save(reference.state_dict(), file)
    resumed = copy.deepcopy(whole)
    optimizer = build_optimizer(resumed, args)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    train(whole, reference, 3)
    train(resumed, optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------ Adafactor

ADAFACTOR = [
    {"lr": 1e-2, "scale_parameter": False, "relative_step": False},
    {"lr": 1e-2, "scale_parameter": False, "relative_step": False, "weight_decay": 0.1, "beta1": 0.9},
    {"lr": 1e-2, "scale_parameter": True, "relative_step": False, "clip_threshold": 0.5},
    {"lr": None, "warmup_init": True},
    {"lr": None, "decay_rate": -0.5, "eps": (1e-20, 1e-2)},
]


@pytest.mark.parametrize("options", ADAFACTOR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adafactor_equals_transformers(options, dtype):
    theirs_class = pytest.importorskip("transformers").Adafactor
    ours, theirs = mlp().to(dtype), mlp().to(dtype)
    train(ours, Adafactor(ours.parameters(), **options), 12)
    train(theirs, theirs_class(theirs.parameters(), **options), 12)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # One unit of bfloat16's last place is 2**-8; a rounding may fall to the other side.
        torch.testing.assert_close(mine, other, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)


def test_adafactor_goes_on_from_transformers_state():
    theirs_class = pytest.importorskip("transformers").Adafactor
    options = ADAFACTOR[0]
    theirs = mlp()
    optimizer = theirs_class(theirs.parameters(), **options)
    train(theirs, optimizer, 3)
    ours = copy.deepcopy(theirs)
    resumed = Adafactor(ours.parameters(), **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(theirs, optimizer, 3)
    train(ours, resumed, 3)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_adafactor_refuses_two_learning_rates():
    with pytest.raises(ArgumentsError, match="relative_step"):
        Adafactor(mlp().parameters(), lr=0.1)


# ------------------------------------------------------------------------------------------------ Muon


def test_muon_leaves_out_embedding_head_norm_and_bias():
    assert list(hidden_matrices(mlp())) == ["first.weight", "second.weight"]


HIDDEN = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "bert": ("query", "key", "value", "dense"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "t5": ("q", "k", "v", "o", "wi", "wo"),
}


@pytest.mark.parametrize("name", MODELS)
def test_muon_takes_the_projections_of_transformers_models_and_nothing_else(models, name):
    model = models[name]
    kinds = {path.split(".")[-2] for path in hidden_matrices(model)}
    assert kinds == set(HIDDEN[name])
    expected = [path for path, p in model.named_parameters() if p.ndim == 2 and path.split(".")[-2] in HIDDEN[name]]
    assert list(hidden_matrices(model)) == expected


def test_muon_groups_hold_every_parameter_once_with_its_decay():
    model = mlp()
    optimizer = build_optimizer(model, arguments("muon"))
    named = {id(p): name for name, p in model.named_parameters()}
    shape = [
        (group["algorithm"], group["weight_decay"], [named[id(p)] for p in group["params"]])
        for group in optimizer.param_groups
    ]
    assert shape == [
        ("muon", 0.01, ["first.weight", "second.weight"]),
        ("adamw", 0.01, ["embed.weight", "out.weight"]),
        ("adamw", 0.0, ["first.bias", "norm.weight", "norm.bias", "second.bias", "out.bias"]),
    ]


def test_muons_other_parameters_move_exactly_as_under_adamw():
    ours, theirs = mlp(), mlp()
    train(ours, build_optimizer(ours, arguments("muon")), 1)
    train(theirs, build_optimizer(theirs, arguments("adamw_torch")), 1)
    hidden = hidden_matrices(ours)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)) == (name not in hidden)


@pytest.mark.parametrize("shape", [(6, 6), (16, 4), (4, 16)])
@pytest.mark.parametrize(("ours", "theirs"), [("match_rms_adamw", "match_rms_adamw"), ("original", "original")])
def test_muon_moves_matrices_as_torchs_does(shape, ours, theirs):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), torch.randn(5, *shape)
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [
        Muon([{"params": [mine], "algorithm": "muon"}], lr=0.01, weight_decay=0.1, adjust_lr=ours),
        torch.optim.Muon([other], lr=0.01, weight_decay=0.1, adjust_lr_fn=theirs),
    ]
    for gradient in gradients:
        for parameter, optimizer in zip((mine, other), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (other - start).norm()
    assert (mine - other).norm() < 0.02 * moved  # theirs iterates in bfloat16


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 32, 8), (2, 8, 32)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), steps=8))
    assert values.min() > 0.5 and values.max() < 1.5


def test_matrices_of_one_shape_are_updated_together_as_if_alone(monkeypatch):
    from loopwright.pt.optim.optimizers import muon

    together, alone = mlp(), mlp()
    args = arguments("muon", optim_target_modules="all-linear")
    train(together, build_optimizer(together, args), 3)
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 1)
    train(alone, build_optimizer(alone, args), 3)
    for one, other in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_muons_options_reach_it():
    options = "momentum=0.8,nesterov=False,ns_steps=3,adjust_lr=original,adamw_lr=0.5"
    optimizer = build_optimizer(mlp(), arguments("muon", optim_args=options))
    first, last = optimizer.param_groups[0], optimizer.param_groups[-1]
    assert (first["momentum"], first["nesterov"], first["ns_steps"], first["adjust_lr"]) == (0.8, False, 3, "original")
    assert (first["lr"], last["lr"]) == (1e-3, 0.5)


def test_muon_can_be_narrowed_to_target_modules():
    assert list(hidden_matrices(mlp(), ["second"])) == ["second.weight"]


def test_a_model_under_a_name_like_embedder_still_has_hidden_matrices():
    wrapped = nn.ModuleDict({"embedder": mlp()})
    assert list(hidden_matrices(wrapped)) == ["embedder.first.weight", "embedder.second.weight"]


def test_muon_without_a_hidden_matrix_says_so():
    said = []
    optimizer = build_optimizer(nn.Linear(3, 3), arguments("muon"), tell=said.append)
    assert "no hidden matrix" in said[0]
    assert {group["algorithm"] for group in optimizer.param_groups} == {"adamw"}


def test_muon_refuses_what_is_not_a_matrix():
    with pytest.raises(ArgumentsError, match="matrices"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "algorithm": "muon"}])


def test_muon_without_the_model_is_an_error():
    with pytest.raises(ArgumentsError, match="needs the model"):
        optimizer_class_and_kwargs(arguments("muon"))
