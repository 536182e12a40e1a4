"""Logits that are computed when they are read: the loss without them is the model's own, and reading always works."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from loopwright.errors import ModelError
from loopwright.speed.fused_loss import recipe as recipe_module
from loopwright.speed.fused_loss.lazy_logits import PendingHead, PendingLogits, defer_linear
from loopwright.speed.fused_loss.recipe import spares_last
from loopwright.speed.output_layer import why_not
from tests.speed.architectures import DECODERS, ENCODERS, GQA, PAIRS, VOCABULARY, build, config

transformers = pytest.importorskip("transformers")

WIDTH, CLASSES = 6, 11


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """What the linear cross-entropy was asked to do."""
    seen: list[dict[str, Any]] = []
    real = recipe_module.linear_cross_entropy

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(recipe_module, "linear_cross_entropy", counting)
    return seen


@pytest.fixture
def double(monkeypatch) -> None:
    """transformers casts logits to float32 before its loss, which would hide everything below 1e-7."""
    to_float = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))


def parts(bias: bool = True, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (2, 5)) -> Any:
    torch.manual_seed(0)
    hidden = torch.randn(*shape, WIDTH, dtype=dtype, requires_grad=True)
    head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
    targets = torch.randint(0, CLASSES, shape)
    targets.view(-1)[1] = -100
    return hidden, head, targets


def pending(hidden: Tensor, head: nn.Linear) -> PendingLogits:
    return defer_linear(hidden, head.weight, head.bias)


def gradients(loss: Tensor, *of: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [each for each in of if each is not None], allow_unused=True))


def same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=True)


# ---- what lies between head and loss ---------------------------------------------------------------------------------

flat = (-1, CLASSES)
RECORDED = {
    "view": lambda z, t: (z.view(-1, CLASSES), t.view(-1)),
    "view size": lambda z, t: (z.view(-1, z.size(-1)), t.view(-1)),
    "reshape": lambda z, t: (torch.reshape(z, (10, CLASSES)), t.reshape(-1)),
    "flatten": lambda z, t: (z.flatten(0, 1), t.flatten()),
    "unsqueeze": lambda z, t: (z.unsqueeze(0).squeeze(0).view(flat), t.view(-1)),
    "float": lambda z, t: (z.float().view(flat), t.view(-1)),
    "to dtype": lambda z, t: (z.to(torch.float32).view(flat), t.view(-1)),
    "to device": lambda z, t: (z.to("cpu").to(device="cpu", dtype=torch.float64).view(flat), t.view(-1)),
    "type_as": lambda z, t: (z.type_as(torch.zeros(1)).view(flat), t.view(-1)),
    "contiguous": lambda z, t: (z.contiguous().view(flat), t.view(-1)),
    "shift": lambda z, t: (z[..., :-1, :].contiguous().view(flat), t[..., 1:].reshape(-1)),
    "shift, short": lambda z, t: (z[:, :-1].reshape(flat), t[:, 1:].reshape(-1)),
    "tail": lambda z, t: (z[:, -3:, :].reshape(flat), t[:, -3:].reshape(-1)),
    "one sample": lambda z, t: (z[0], t[0]),
    "every second": lambda z, t: (z[:, ::2].reshape(flat), t[:, ::2].reshape(-1)),
    "mask": lambda z, t: (z[t != -100], t[t != -100]),
    "places": lambda z, t: (z[:, torch.tensor([3, 0, 3])].reshape(flat), t[:, [3, 0, 3]].reshape(-1)),
    "pairs": lambda z, t: (z[torch.tensor([0, 1]), torch.tensor([2, 3])], t[[0, 1], [2, 3]]),
    "scale": lambda z, t: ((z * 0.25).view(flat), t.view(-1)),
    "scale from the left": lambda z, t: ((3 * z).view(flat), t.view(-1)),
    "divide": lambda z, t: ((z / 8.0).view(flat), t.view(-1)),
    "constant": lambda z, t: ((z * torch.tensor(0.5, dtype=z.dtype)).view(flat), t.view(-1)),
    "softcap": lambda z, t: ((torch.tanh(z / 3.0) * 3.0).view(flat), t.view(-1)),
    "softcap of scaled": lambda z, t: ((torch.tanh(z * 2.0 / 3.0) * 3.0).view(flat) * 0.5, t.view(-1)),
    "scaled tanh method": lambda z, t: (z.div(2.0).tanh().mul(2.0).view(flat), t.view(-1)),
    "one more bias": lambda z, t: ((z + torch.linspace(0, 1, CLASSES, dtype=z.dtype)[None]).view(flat), t.view(-1)),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", RECORDED)
def test_what_models_do_between_head_and_loss_is_recorded(name, bias, calls):
    hidden, head, targets = parts(bias)
    logits = pending(hidden, head)
    prepared, chosen = RECORDED[name](logits, targets)
    loss = F.cross_entropy(prepared, chosen)
    assert len(calls) == 1 and not logits.is_real
    found = gradients(loss, hidden, head.weight, head.bias)

    plain, _ = RECORDED[name](F.linear(hidden, head.weight, head.bias), targets)
    assert (prepared.shape, prepared.dtype, prepared.device) == (plain.shape, plain.dtype, plain.device)
    assert loss.dtype == plain.dtype
    expected = F.cross_entropy(plain, chosen)
    is_exact = plain.dtype == torch.float64
    same(loss, expected, 1e-12 if is_exact else 1e-6)
    same(found, gradients(expected, hidden, head.weight, head.bias), 1e-12 if is_exact else 1e-6)
    assert torch.equal(prepared.real(), plain)  # the recorded operations themselves are run


LOSSES = {
    "module": lambda z, t: nn.CrossEntropyLoss()(z, t),
    "sum": lambda z, t: F.cross_entropy(z, t, reduction="sum"),
    "positional": lambda z, t: F.cross_entropy(z, t, None, None, 3),
    "ignore_index": lambda z, t: F.cross_entropy(z, t.clamp(min=0), ignore_index=0),
    "smoothing": lambda z, t: nn.CrossEntropyLoss(label_smoothing=0.1)(z, t),
    "smoothed sum": lambda z, t: F.cross_entropy(z, t, label_smoothing=0.3, reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_need_no_logits(name, calls):
    hidden, head, targets = parts(shape=(7,))
    targets = targets.clamp(min=0) if name == "positional" else targets
    loss = LOSSES[name](pending(hidden, head), targets)
    assert len(calls) == 1
    expected = LOSSES[name](head(hidden), targets)
    same(loss, expected)
    same(gradients(loss, hidden, *head.parameters()), gradients(expected, hidden, *head.parameters()))


OTHERS = {
    "none": lambda z, t: F.cross_entropy(z, t, reduction="none").sum(),
    "class weights": lambda z, t: F.cross_entropy(z, t, weight=torch.arange(CLASSES).to(z.dtype)),
    "probabilities": lambda z, t: F.cross_entropy(z, torch.full((7, CLASSES), 1 / CLASSES, dtype=z.dtype)),
    "transposed": lambda z, t: F.cross_entropy(z[None].transpose(1, 2), t[None]),
    "log_softmax": lambda z, t: F.nll_loss(F.log_softmax(z, dim=-1), t),
    "plus": lambda z, t: F.cross_entropy(z, t) + 1e-2 * z.logsumexp(-1).square().mean(),
    "two tanh": lambda z, t: F.cross_entropy(z.tanh().tanh(), t),
    "classes cut": lambda z, t: F.cross_entropy(z[..., : CLASSES - 2], t.clamp(max=CLASSES - 3)),
    "one more dimension": lambda z, t: (z[..., None] * 2).mean(),
    "last index": lambda z, t: z[..., 0].sum(),
    "function of two": lambda z, t: torch.stack([z, z]).sum(),
    "kwargs": lambda z, t: torch.einsum("ij,ij->", z, z),
    "in place": lambda z, t: F.cross_entropy(z.mul_(2.0), t),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_gets_real_logits_and_gradients(name):
    hidden, head, targets = parts(shape=(7,))
    loss = OTHERS[name](pending(hidden, head), targets)
    expected = OTHERS[name](head(hidden), targets)
    assert type(loss) is Tensor
    same(loss, expected)
    same(gradients(loss, hidden, *head.parameters()), gradients(expected, hidden, *head.parameters()))


def test_asking_for_the_numbers():
    hidden, head, _ = parts()
    real = F.linear(hidden, head.weight, head.bias)
    for ask in (
        lambda z: z.detach(),
        lambda z: z.argmax(-1),
        lambda z: z.softmax(-1),
        lambda z: z.clone(),
        lambda z: z.data,
        lambda z: z[0, 0, 0].item(),
        lambda z: z.tolist(),
        lambda z: z.detach().cpu().numpy().tolist(),
        lambda z: z == real,
        lambda z: torch.cat([z, real]),
        lambda z: torch.equal(z, real),
        lambda z: [row.sum() for row in z],
        lambda z: float(z.sum()),
        lambda z: z.transpose(0, 1).shape,
        lambda z: z.max(dim=-1).indices,
    ):
        logits = pending(hidden, head)
        same(ask(logits), ask(real))
        assert logits.is_real


def test_printing_shows_the_numbers():
    hidden, head, _ = parts()
    found, expected = (repr(each).split("grad_fn")[0] for each in (pending(hidden, head), head(hidden)))
    assert found == expected


def test_questions_about_the_shape_compute_nothing():
    hidden, head, _ = parts()
    logits = pending(hidden, head)
    assert isinstance(logits, Tensor) and torch.is_tensor(logits)
    assert logits.shape == (2, 5, CLASSES) and logits.size(-1) == CLASSES and len(logits) == 2
    assert logits.dtype == torch.float64 and logits.device == hidden.device and logits.dim() == logits.ndim == 3
    assert logits.requires_grad and not logits.is_leaf and logits.grad_fn is not None and not logits.is_cuda
    assert logits.is_floating_point() and logits.numel() == 110 and logits.is_contiguous()
    assert {logits: 1}[logits] == 1 and hash(logits)
    assert not logits.is_real


def test_real_logits_are_computed_once_and_then_used_by_the_loss(calls):
    hidden, head, targets = parts()
    logits = pending(hidden, head)
    assert logits.real() is logits.real()
    F.cross_entropy(logits.view(flat), targets.view(-1)).backward()
    assert not calls and head.weight.grad is not None


def test_changes_in_place_are_seen_by_all_views():
    hidden, head, targets = parts()

    def change(logits: Tensor) -> list[Tensor]:
        view, wide = logits[:, :-1], logits.to(torch.float32)
        logits[..., 3] = -5.0
        return [view + 0, wide + 0, F.cross_entropy(logits.view(flat), targets.view(-1))]

    same(change(pending(hidden, head)), change(head(hidden)))


def test_out_arguments_are_filled():
    hidden, head, _ = parts()
    logits = pending(hidden.detach(), head.requires_grad_(False))
    torch.mul(torch.ones(2, 5, CLASSES, dtype=torch.float64), 2.0, out=logits)
    assert (logits == 2).all()


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_has_a_gradient(without):
    hidden, head, targets = parts()
    logits = pending(hidden, head)
    with without():
        loss = F.cross_entropy(logits.view(flat), targets.view(-1))
        doubled = logits * 2.0
    assert not loss.requires_grad and not doubled.requires_grad and type(doubled) is Tensor
    same(loss, F.cross_entropy(head(hidden).view(flat), targets.view(-1)).detach())
    (logits * 1.0).sum().backward()  # what was asked for under no_grad is still differentiable outside
    assert hidden.grad is not None


class Twice(torch.autograd.Function):
    """A user's own function, which does not go through __torch_function__."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize("name", ["plain", "softcap", "shift", "one more bias"])
def test_gradients_arrive_through_functions_that_see_the_wrapper(name):
    hidden, head, targets = parts()
    change = RECORDED[name] if name != "plain" else lambda z, t: (z, t)
    found = Twice.apply(change(pending(hidden, head), targets)[0])
    expected = 2 * change(head(hidden), targets)[0]
    same(found, expected)
    same(gradients(found.square().sum(), hidden, *head.parameters()),
         gradients(expected.square().sum(), hidden, *head.parameters()))  # fmt: skip


def test_a_backward_from_the_wrapper_itself():
    hidden, head, _ = parts()
    logits, gradient = pending(hidden, head), torch.randn(2, 5, CLASSES, dtype=torch.float64)
    torch.autograd.backward([logits], [gradient])
    expected = torch.autograd.grad(head(hidden), [hidden, *head.parameters()], gradient)
    same([hidden.grad, head.weight.grad, head.bias.grad], list(expected))


def test_learned_and_device_scales_need_no_number(calls):
    hidden, head, targets = parts()
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy((pending(hidden, head) * scale).view(flat), targets.view(-1))
    assert len(calls) == 1
    expected = F.cross_entropy((head(hidden) * scale).view(flat), targets.view(-1))
    same(gradients(loss, hidden, scale, *head.parameters()), gradients(expected, hidden, scale, *head.parameters()))


def test_pickling_saving_and_copying_give_plain_tensors():
    hidden, head, _ = parts()
    hidden, head = hidden.detach(), head.requires_grad_(False)
    real = head(hidden)
    buffer = io.BytesIO()
    torch.save({"logits": pending(hidden, head)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["logits"]
    for found in (loaded, pickle.loads(pickle.dumps(pending(hidden, head))), copy.deepcopy(pending(hidden, head))):
        assert type(found) is Tensor and torch.equal(found, real)


def test_logits_of_a_changed_head_are_refused():
    hidden, head, _ = parts()
    early, late = pending(hidden, head), pending(hidden, head)
    early.real()
    with torch.no_grad():
        head.weight.mul_(0.5)
    early.argmax(-1)
    with pytest.raises(ModelError, match="before the optimizer step"):
        late.argmax(-1)


def test_nothing_keeps_logits_alive():
    hidden, head, targets = parts()
    gc.collect()
    gc.disable()
    try:
        logits = pending(hidden, head)
        references = [weakref.ref(logits), weakref.ref(logits.view(flat).float())]
        loss = F.cross_entropy(logits.view(flat), targets.view(-1))
        del logits
        assert [reference() for reference in references] == [None, None]
        loss.backward()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("index", "spares"),
    [
        ((slice(None),), True), ((Ellipsis,), True), ((0, 1), True), ((None, 0), True), ((), True),
        ((Ellipsis, slice(None)), True), ((0, 0, slice(None)), True), ((Ellipsis, 0, slice(None)), True),
        ((torch.ones(2, 5, dtype=torch.bool),), True), ((torch.tensor([0]), Ellipsis), True),
        ((Ellipsis, 0), False), ((0, 0, 0), False), ((Ellipsis, None), False), ((Ellipsis, slice(1)), False),
        ((torch.ones(2, 5, 3, dtype=torch.bool),), False), ((0, 0, 0, Ellipsis), False), ((True,), False),
        (([0, 1],), False), ((slice(None), slice(None), torch.tensor([0])), False),
    ],
)  # fmt: skip
def test_which_index_leaves_the_classes_alone(index, spares):
    assert spares_last(index, 3) is spares


# ---- transformers ----------------------------------------------------------------------------------------------------

MODELS = {
    **dict.fromkeys(DECODERS, "causal"),
    **dict.fromkeys(ENCODERS, "masked"),
    **dict.fromkeys(PAIRS, "pair"),
    "qwen2_moe": "causal",
    "mixtral": "causal",
}
MORE = {
    "qwen2_moe": {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1, "output_router_logits": True},
    "mixtral": {**GQA, "num_local_experts": 4, "output_router_logits": True},
}  # fmt: skip
ALWAYS = ("llama", "gemma2", "granite", "cohere", "phi", "gpt2", "t5", "bart", "bert", "qwen2_moe")


def model_of(kind: str) -> nn.Module:
    if kind not in MORE:
        return build(kind, MODELS[kind])
    torch.manual_seed(0)
    made = config(kind, MORE[kind])
    made._experts_implementation = "eager"  # grouped matmuls have no float64
    return transformers.AutoModelForCausalLM.from_config(made).double()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (2, 9))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids % 3 == 0, -100)}


@pytest.mark.parametrize("items", [None, 7], ids=["mean", "items"])
@pytest.mark.parametrize(
    "kind", [kind if kind in ALWAYS else pytest.param(kind, marks=pytest.mark.grid) for kind in MODELS]
)
def test_models_of_transformers_keep_their_loss_and_gradients(kind, items, calls, double):
    model = model_of(kind).train()
    takes_items = "kwargs" in inspect.signature(model.forward).parameters
    told = {"num_items_in_batch": torch.tensor(items)} if items and takes_items else {}

    def run() -> tuple[Any, dict[str, Tensor]]:
        model.zero_grad()
        outputs = model(**batch(), **told)
        outputs.loss.backward()
        return outputs, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    expected, wanted = run()
    head = PendingHead(model.get_output_embeddings())
    head.install()
    head.count = int((batch()["labels"] != -100).sum())
    found, got = run()
    assert len(calls) == 1, "the loss was computed from logits"
    assert type(found.logits) is PendingLogits and not found.logits.is_real
    same(found.loss, expected.loss, 1e-10)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        same(got[name], gradient, 1e-10)
    same(found.logits.detach(), expected.logits.detach(), 1e-10)
    same(found["logits"] + 0.0, expected["logits"] + 0.0, 1e-10)
    head.remove()
    assert type(model(**batch()).logits) is Tensor


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("loss_inside", [True, False], ids=["loss inside", "loss outside"])
def test_autocast_counts_where_the_head_was_called(loss_inside, bias, calls):
    hidden, head, targets = parts(bias, torch.float32, (4, 16))

    def run(forward: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = forward(hidden)
            if loss_inside:
                return F.cross_entropy(logits.float().view(flat), targets.view(-1)), logits
        return F.cross_entropy(logits.float().view(flat), targets.view(-1)), logits

    loss, logits = run(lambda x: pending(x, head))
    expected, real = run(head)
    assert len(calls) == 1 and loss.dtype == torch.float32 and logits.dtype == real.dtype == torch.bfloat16
    same(loss, expected, 1e-5)
    same(gradients(loss, hidden, *head.parameters()), gradients(expected, hidden, *head.parameters()), 2e-2)
    assert torch.equal(logits.real(), real)


def test_logits_made_outside_autocast_stay_so_inside():
    hidden, head, _ = parts(dtype=torch.float32)
    logits = pending(hidden, head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert logits.real().dtype == torch.float32


def test_float64_is_left_alone_by_autocast():
    hidden, head, _ = parts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pending(hidden, head).dtype == F.linear(hidden, head.weight, head.bias).dtype == torch.float64


# ---- the head --------------------------------------------------------------------------------------------------------


def test_a_head_waits_only_while_it_trains():
    hidden, head, _ = parts()
    pending_head = PendingHead(head)
    pending_head.install()
    pending_head.install()  # twice is once
    assert type(head(hidden)) is PendingLogits
    with torch.no_grad():
        assert type(head(hidden)) is Tensor
    assert type(head(hidden[0, 0])) is Tensor
    assert type(torch.func.functional_call(head, dict(head.named_parameters()), hidden)) is PendingLogits
    assert type(torch.func.vjp(lambda x: head(x).sum(), hidden)[0]) is Tensor
    head.eval()
    assert type(head(hidden)) is Tensor


def test_removing_leaves_no_trace():
    hidden, head, _ = parts()
    before, keys = dict(vars(head)), list(head.state_dict())
    pending_head = PendingHead(head)
    pending_head.install()
    assert list(head.state_dict()) == keys and pending_head.is_installed
    pending_head.remove()
    pending_head.remove()
    assert vars(head) == before and type(head(hidden)) is Tensor and not pending_head.is_installed
    assert torch.equal(pickle.loads(pickle.dumps(head)).weight, head.weight)


def test_a_copied_model_has_a_head_of_its_own():
    _, head, _ = parts()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), head)
    pending_head = PendingHead(head)
    pending_head.install()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin[1].weight.zero_()
        logits = twin(torch.randn(2, WIDTH, dtype=torch.float64))
        assert logits.recipe.weight is twin[1].weight
    assert head.weight.any()


class MyLinear(nn.Linear):
    pass


def with_hook() -> nn.Module:
    head = nn.Linear(2, 3)
    head.register_forward_hook(lambda *_: None)
    return head


def with_forward() -> nn.Module:
    head = nn.Linear(2, 3)
    head.forward = lambda x: x
    return head


@pytest.mark.parametrize(
    ("head", "reason"),
    [(MyLinear(2, 3), "MyLinear"), (nn.Identity(), "Identity"), (with_hook(), "hooks"), (with_forward(), "replaced"),
     (nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)), "ParametrizedLinear"), (None, "NoneType")],
    ids=["subclass", "other", "hook", "forward", "parametrized", "none"],
)  # fmt: skip
def test_heads_that_do_more_than_a_linear_map_are_refused(head, reason):
    assert reason in why_not(head)
    if head is not None:
        with pytest.raises(ModelError, match=reason):
            PendingHead(head).install()


def test_hooks_added_later_see_real_numbers():
    hidden, head, _ = parts()
    PendingHead(head).install()
    seen = []
    head.register_forward_hook(lambda module, inputs, output: seen.append(output.argmax(-1)))
    expected = F.linear(hidden, head.weight, head.bias)
    same(head(hidden) + 0, expected)
    assert torch.equal(seen[0], expected.argmax(-1))


@pytest.mark.parametrize("count", [9, 10, 20, None])
def test_the_count_reaches_the_first_loss_of_a_device(count, calls, monkeypatch):
    hidden, head, targets = parts()
    monkeypatch.setattr(recipe_module, "counts_by_itself", lambda device: False)
    pending_head = PendingHead(head)
    pending_head.install()
    pending_head.count = count
    logits = head(hidden).view(flat)
    loss = F.cross_entropy(logits, targets.view(-1))
    F.cross_entropy(logits, targets.view(-1).clamp(min=0))
    assert [call["count"] for call in calls] == [count, None]
    same(loss, F.cross_entropy(F.linear(hidden, head.weight, head.bias).view(flat), targets.view(-1)))


@pytest.mark.parametrize("count", [0, 8])
def test_a_count_that_is_too_small_is_no_matter_on_a_host(count):
    hidden, head, targets = parts()
    pending_head = PendingHead(head)
    pending_head.install()
    pending_head.count = count
    loss = F.cross_entropy(head(hidden).view(flat), targets.view(-1))
    same(loss, F.cross_entropy(F.linear(hidden, head.weight, head.bias).view(flat), targets.view(-1)))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("what", ["head", "head and loss"])
def test_checkpointing_around_the_head(what, reentrant):
    hidden, head, targets = parts()
    expected = F.cross_entropy(head(hidden).view(flat), targets.view(-1))
    expected = gradients(expected, hidden, *head.parameters())
    PendingHead(head).install()

    def loss_of(x: Tensor) -> Tensor:
        return F.cross_entropy(head(x).view(flat), targets.view(-1))

    if what == "head":
        loss = F.cross_entropy(checkpoint(head, hidden, use_reentrant=reentrant).view(flat), targets.view(-1))
    else:
        loss = checkpoint(loss_of, hidden, use_reentrant=reentrant)
    loss.backward()
    same([hidden.grad, *(parameter.grad for parameter in head.parameters())], expected)
