"""Logits that are not computed, used in every way a loss may use logits: each gives what real logits give, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from loopwright.speed.fused_loss.lazy_logits import PendingHead, PendingLogits
from tests.speed.architectures import build
from tests.speed.training import InOrder, train
from tests.spreads import spread

WIDTH, CLASSES, SHAPE = 6, 11, (3, 5)
Use = Callable[["Made"], Any]


class Made:
    """A body and a head on the same input, their logits, and what a loss may want besides."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda z: z, *, pending: bool) -> None:
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
        self.inputs = torch.randn(*SHAPE, WIDTH, dtype=torch.float64, requires_grad=True)
        self.targets = torch.randint(0, CLASSES, SHAPE)
        self.targets[0, 1:3] = -100
        self.others = torch.randint(0, CLASSES, SHAPE)
        self.teacher = torch.randn(*SHAPE, CLASSES, dtype=torch.float64)
        self.pending_head = PendingHead(self.head)
        if pending:
            self.pending_head.install()
            self.pending_head.count = int((self.targets != -100).sum())
        self.change = change
        self.logits = self.forward()

    def forward(self, inputs: Tensor | None = None) -> Tensor:
        return self.change(self.head(torch.tanh(self.body(self.inputs if inputs is None else inputs))))

    def loss(self, targets: Tensor | None = None, **options: Any) -> Tensor:
        return ce(self.logits, self.targets if targets is None else targets, **options)

    def parameters(self) -> list[Tensor]:
        return [self.inputs, *self.body.parameters(), *self.head.parameters()]

    def gradients(self, loss: Tensor, **options: Any) -> list[Any]:
        return list(torch.autograd.grad(loss, self.parameters(), allow_unused=True, **options))


def ce(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), **options)


def trained(use: Callable[[Made], Tensor]) -> Use:
    """The loss and all its gradients."""
    return lambda made: [loss := use(made), *made.gradients(loss)]


def kl(made: Made) -> Tensor:
    return F.kl_div(made.logits.log_softmax(-1), made.teacher.log_softmax(-1), log_target=True, reduction="batchmean")


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def penalty(made: Made, loss: Tensor, of: list[Tensor]) -> Tensor:
    """A gradient penalty: the squared gradient, itself to be differentiated."""
    return sum(each.square().sum() for each in torch.autograd.grad(loss, of, create_graph=True))  # type: ignore


SECOND_LOSSES: dict[str, Callable[[Made], Tensor]] = {
    "distillation after": lambda m: m.loss() + kl(m),
    "distillation before": lambda m: kl(m) + m.loss(),
    "other targets, more of them": lambda m: m.loss() + 0.5 * m.loss(m.others),
    "other targets first": lambda m: 0.5 * m.loss(m.others) + m.loss(),
    "the same twice": lambda m: m.loss() + m.loss(),
    "other shift": lambda m: m.loss() + ce(m.logits[:, :-1], m.others[:, 1:]) + ce(m.logits[:, :-2], m.others[:, 2:]),
    "other ignore_index": lambda m: m.loss() + m.loss(m.others, ignore_index=3),
    "class weights": lambda m: m.loss() + m.loss(m.others, weight=torch.arange(CLASSES).double()),
    "no reduction": lambda m: m.loss() + (m.loss(m.others, reduction="none") * torch.arange(15).double()).sum(),
    "sum": lambda m: m.loss() + m.loss(m.others, reduction="sum"),
    "label smoothing": lambda m: m.loss(label_smoothing=0.1) + m.loss(m.others, label_smoothing=0.3),
    "entropy bonus": lambda m: m.loss() - 0.1 * entropy(m.logits),
    "entropy bonus before": lambda m: -0.1 * entropy(m.logits) + m.loss(),
    "z-loss": lambda m: m.loss() + 1e-2 * m.logits.logsumexp(-1).square().mean(),
    "probabilities as targets": lambda m: m.loss() + ce_soft(m),
    "nll": lambda m: m.loss() + F.nll_loss(m.logits.log_softmax(-1).flatten(0, 1), m.others.flatten()),
    "a slice of classes": lambda m: m.loss() + m.logits[..., :3].square().mean(),
    "one place": lambda m: m.loss() + m.logits[1, 2, 3] * 2.0,
    "gather": lambda m: m.loss() - m.logits.gather(-1, m.others[..., None]).mean(),
    "focal": lambda m: focal(m.logits, m.others) + m.loss(),
    "a margin between samples": lambda m: m.loss() + F.relu(m.logits[0] - m.logits[1]).mean(),
    "detached factor": lambda m: m.loss() * m.logits.detach().std(),
    "a branch without gradient": lambda m: m.loss() + m.logits.detach().square().mean(),
    "two forwards": lambda m: m.loss() + ce(m.forward(m.inputs * 0.5), m.others),
    "consistency of two forwards": lambda m: m.loss() + F.mse_loss(m.forward(m.inputs * 0.5), m.logits),
    "R-Drop": lambda m: m.loss() + ce(second := m.forward(m.inputs * 0.9), m.targets) + both_ways(m.logits, second),
    "contrastive": lambda m: F.cross_entropy(m.logits[:, 0] @ m.logits[:, 0].t(), torch.arange(3)) + m.loss(),
    "in place after": lambda m: m.loss() + m.logits.mul_(2.0).square().mean(),
    "in place before": lambda m: (m.logits.clamp_(-0.5, 0.5), m.loss())[1],
    "in place on a view": lambda m: (view := m.logits[:, :2], view.mul_(3.0), m.loss())[2],
    "used, then in place": lambda m: (m.logits[:, :2] + 0).exp().sum() + m.logits.add_(1.0).square().mean() + m.loss(),
    "masked classes": lambda m: (m.logits.masked_fill_(torch.arange(CLASSES) == 4, -50.0), m.loss(m.others % 4))[1],
    "written to": lambda m: (m.logits.__setitem__((..., 3), -5.0), m.loss())[1],
    "checkpointed loss": lambda m: checkpoint(lambda z: ce(z, m.targets), m.logits, use_reentrant=False) + kl(m),
    "vmap": lambda m: torch.func.vmap(lambda z: z.logsumexp(-1).mean())(m.logits).mean() + m.loss(),
    "gradient of logits by torch.func": lambda m: m.loss() + torch.func.grad(lambda z: ce(z, m.others))(m.logits).sum(),
    "stacked": lambda m: torch.stack([m.logits, m.teacher]).logsumexp(0).mean() + m.loss(),
    "numpy": lambda m: m.loss() * float(m.logits.detach().numpy().max()),
    "product with a learned scale": lambda m: ce(m.logits * m.body.bias.sum(), m.others) + m.loss() + kl(m),
    "gradient penalty on the inputs": lambda m: m.loss() + penalty(m, m.loss(), [m.inputs]),
    "gradient penalty on weights": lambda m: penalty(m, m.loss(), m.parameters()),
    "gradient penalty, sum and smoothing": lambda m: penalty(
        m, m.loss(reduction="sum", label_smoothing=0.2), [m.inputs]
    ),
    "gradient penalty of two losses": lambda m: penalty(m, m.loss() + kl(m), m.parameters()),
    "gradient penalty on the logits": lambda m: m.loss() + penalty(m, m.loss(), [m.logits]),
    "gradient penalty on logits of two losses": lambda m: penalty(m, m.loss() + kl(m), [m.logits]),
    "virtual adversarial": lambda m: m.loss() + virtual_adversarial(m),
    "fast gradient": lambda m: m.loss() + fast_gradient(m),
}  # fmt: skip


def ce_soft(made: Made) -> Tensor:
    return F.cross_entropy(made.logits.flatten(0, 1), made.teacher.softmax(-1).flatten(0, 1))


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    loss = ce(logits, targets, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def both_ways(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.log_softmax(-1), b.log_softmax(-1)
    return F.kl_div(a, b, log_target=True) + F.kl_div(b, a, log_target=True)


def virtual_adversarial(made: Made) -> Tensor:
    step = (torch.ones_like(made.inputs) * 1e-2).requires_grad_()
    distance = both_ways(made.logits.detach(), made.forward(made.inputs + step))
    direction = F.normalize(torch.autograd.grad(distance, step)[0], dim=-1)
    return both_ways(made.logits, made.forward(made.inputs + 0.1 * direction))


def fast_gradient(made: Made) -> Tensor:
    (gradient,) = torch.autograd.grad(made.loss(), made.inputs, retain_graph=True)
    return ce(made.forward(made.inputs + 0.1 * F.normalize(gradient, dim=-1)), made.targets)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "as the head has them": lambda z: z,
    "softcapped": lambda z: torch.tanh(z / 2.0) * 2.0,
    "scaled": lambda z: z * 0.5,
    "cast and cut": lambda z: z.to(torch.float64)[:, :],
    "one more bias": lambda z: z + torch.linspace(0, 1, CLASSES, dtype=z.dtype),
}


def same(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=True, equal_nan=True)


@pytest.mark.parametrize(("name", "change"), spread(SECOND_LOSSES, CHANGES))
def test_a_loss_that_uses_logits_twice_is_the_one_of_real_logits(name: str, change: str) -> None:
    use, made = trained(SECOND_LOSSES[name]), [Made(CHANGES[change], pending=pending) for pending in (False, True)]
    assert type(made[0].logits) is Tensor and type(made[1].logits) is PendingLogits
    expected, found = (use(each) for each in made)
    assert all(type(each) is Tensor for each in found if each is not None)
    same(found, expected)


# ---- the gradient of the logits --------------------------------------------------------------------------------------


def retained(before: bool) -> Use:
    def use(made: Made) -> list[Any]:
        if before:
            made.logits.retain_grad()
        loss = made.loss()
        if not before:
            made.logits.retain_grad()
        loss.backward()
        return [loss.detach(), made.logits.grad, *(each.grad for each in made.parameters())]

    return use


def hooked(before: bool) -> Use:
    """A hook that doubles the gradient on its way."""

    def use(made: Made) -> list[Any]:
        seen: list[Tensor] = []

        def hook(gradient: Tensor) -> Tensor:
            seen.append(gradient.clone())
            return gradient * 2.0

        if before:
            made.logits.register_hook(hook)
        loss = made.loss() + (0.0 if before else kl(made))
        if not before:
            made.logits.register_hook(hook)
        loss.backward()
        return [loss.detach(), *seen, *(each.grad for each in made.parameters())]

    return use


def by_node(made: Made) -> list[Any]:
    seen: list[Tensor] = []
    loss = made.loss()
    made.logits.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].clone()))
    loss.backward()
    return [*seen, *(each.grad for each in made.parameters())]


def by_inputs(made: Made) -> list[Any]:
    loss = made.loss()
    torch.autograd.backward(loss, inputs=[made.logits, made.head.weight])
    return [made.logits.grad, made.head.weight.grad, made.body.weight.grad]


def all_in_one(made: Made) -> list[Any]:
    loss = made.loss() + 0.1 * made.loss(made.others)
    return list(torch.autograd.grad(loss, [made.logits, *made.parameters()], retain_graph=True)) + made.gradients(loss)


GRADIENTS: dict[str, Use] = {
    "of a loss": lambda m: torch.autograd.grad(m.loss(), m.logits),
    "of a sum": lambda m: torch.autograd.grad(
        m.loss(m.others, reduction="sum", ignore_index=2, label_smoothing=0.1), m.logits
    ),
    "of two losses": lambda m: torch.autograd.grad(m.loss() + kl(m), m.logits),
    "of two cross-entropies": lambda m: torch.autograd.grad(m.loss() + m.loss(m.others), [m.logits]),
    "of a loss of a part": lambda m: torch.autograd.grad(ce(m.logits[:, :-1], m.others[:, 1:]), m.logits),
    "with everything else": all_in_one,
    "retained before": retained(True),
    "retained after": retained(False),
    "hooked before": hooked(True),
    "hooked after": hooked(False),
    "at the node": by_node,
    "by backward(inputs=...)": by_inputs,
    "of the logits": lambda m: torch.autograd.grad(m.logits, m.parameters(), m.teacher),
    "kept for later": lambda m: [
        *torch.autograd.grad(loss := m.loss(), m.logits, retain_graph=True), *m.gradients(loss)
    ],
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_the_logits_can_be_asked_for(name: str, change: str) -> None:
    expected, found = (GRADIENTS[name](Made(CHANGES[change], pending=pending)) for pending in (False, True))
    same(list(found), list(expected))


def test_a_tensor_that_is_not_in_the_graph_is_the_error_of_torch() -> None:
    made = Made(pending=True)
    other = made.logits * 1.0
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(made.loss(), other)


# ---- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}])
def test_no_target_at_all_is_what_torch_says(options: dict[str, Any]) -> None:
    nothing = torch.full(SHAPE, -100)
    expected, found = (trained(lambda m: m.loss(nothing, **options))(Made(pending=p)) for p in (False, True))
    same(found, expected)


@pytest.mark.parametrize("target", [-1, CLASSES, -101])
def test_a_target_that_is_no_class_is_the_error_of_torch(target: int) -> None:
    for pending in (False, True):
        made = Made(pending=pending)
        made.targets[1, 1] = target
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
            made.loss()


@pytest.mark.parametrize("frozen", ["head", "body", "inputs", "head and body"])
@pytest.mark.parametrize("name", ["distillation after", "gradient penalty on the inputs"])
def test_what_is_frozen_stays_so(frozen: str, name: str) -> None:
    def run(pending: bool) -> list[Any]:
        made = Made(pending=pending)
        for key, part in (("head", made.head), ("body", made.body), ("inputs", made.inputs)):
            if key in frozen and not (key == "inputs" and "penalty" in name):
                part.requires_grad_(False)
        made.logits = made.forward()
        loss = SECOND_LOSSES[name](made)
        of = [each for each in made.parameters() if each.requires_grad]
        return [loss, *torch.autograd.grad(loss, of, allow_unused=True)]

    same(run(True), run(False))


def test_a_weight_that_is_also_the_embedding_gets_both_gradients() -> None:
    def run(pending: bool) -> list[Tensor]:
        torch.manual_seed(0)
        embedding, head = nn.Embedding(CLASSES, WIDTH).double(), nn.Linear(WIDTH, CLASSES, bias=False).double()
        head.weight = embedding.weight
        if pending:
            PendingHead(head).install()
        ids = torch.randint(0, CLASSES, SHAPE)
        logits = head(torch.tanh(embedding(ids)))
        loss = ce(logits[:, :-1], ids[:, 1:]) + 0.1 * entropy(logits)
        (first,) = torch.autograd.grad(loss, embedding.weight, create_graph=True)
        return [loss, first, *torch.autograd.grad(first.square().sum(), embedding.weight)]

    same(run(True), run(False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_torch(dtype: torch.dtype) -> None:
    def run(pending: bool, kind: torch.dtype) -> list[Tensor]:
        made = Made(pending=False)
        for module in (made.body, made.head):
            module.to(kind)
        if pending:
            made.pending_head.install()
        made.inputs = made.inputs.detach().to(kind).requires_grad_()
        made.logits = made.forward()
        loss = made.loss() + made.loss(made.others) + made.logits.float().logsumexp(-1).square().mean()
        return [loss, *made.gradients(loss)]

    exact, plain, found = run(False, torch.float64), run(False, dtype), run(True, dtype)
    for each, by_torch, by_us in zip(exact, plain, found, strict=True):
        assert by_us.dtype == by_torch.dtype
        assert (by_us - each).norm() <= 1.5 * (by_torch - each).norm() + 1e-2 * each.norm()


# ---- logits that are kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
def test_logits_kept_for_metrics_have_the_numbers_of_their_forward(change: str) -> None:
    made = Made(CHANGES[change], pending=True)
    expected = Made(CHANGES[change], pending=False).logits
    made.loss().backward()
    made.pending_head.remove()  # the update is over: the optimizer is next
    with torch.no_grad():
        made.head.weight.mul_(0.5)
    same(made.logits.detach(), expected.detach())


def test_other_weights_behind_the_parameter_do_not_change_logits_of_before() -> None:
    made, expected = Made(pending=True), Made(pending=False)
    kept, made.head.weight.data = made.head.weight.data, torch.zeros_like(made.head.weight)
    same(kl(made), kl(expected))
    made.head.weight.data = kept


def test_logits_of_weights_that_were_changed_behind_the_back_of_autograd_are_refused() -> None:
    made = Made(pending=True)
    made.head.weight.data.mul_(1.01)
    with pytest.raises(Exception, match="changed since the forward"):
        made.logits.argmax(-1)


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_full_backward_hook", "register_forward_pre_hook"])
def test_hooks_that_come_later_see_what_they_would_have_seen(kind: str) -> None:
    def run(pending: bool) -> list[Any]:
        made, seen = Made(pending=pending), []
        getattr(made.head, kind)(lambda module, *given: seen.extend(each for each in given[-1] if each is not None))
        loss = ce(made.forward(), made.targets)
        return [loss, *made.gradients(loss), *(each.detach() for each in seen)]

    same(run(True), run(False))


def test_a_head_with_a_hook_is_left_as_it_is_and_says_why() -> None:
    made = Made(pending=False)
    made.head.register_forward_hook(lambda *_: None)
    assert made.pending_head.try_install() == "it has hooks" and not made.pending_head.is_installed


def test_a_compiled_loss_gets_real_logits() -> None:
    @torch.compile(backend="eager")
    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return ce(logits, targets) + logits.logsumexp(-1).mean()

    use = trained(lambda m: loss_of(m.logits, m.targets) + m.loss())
    same(use(Made(pending=True)), use(Made(pending=False)))


def test_losses_without_gradient_in_between_change_nothing() -> None:
    def use(made: Made) -> Tensor:
        with torch.no_grad():
            weight = made.loss(made.others) + made.logits.max()
        return made.loss() * weight

    same(trained(use)(Made(pending=True)), trained(use)(Made(pending=False)))


def test_whether_logits_were_used_is_known() -> None:
    made = Made(pending=True)
    made.loss().backward()
    assert not made.pending_head.logits_were_used
    made.logits.argmax(-1)
    assert made.pending_head.logits_were_used


# ---- in training -----------------------------------------------------------------------------------------------------


class WithAccuracy(InOrder):
    """Reads the logits besides the loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return outputs.loss + 1e-3 * outputs.logits.logsumexp(-1).square().mean()


class WithLaterTarget(InOrder):
    """A second cross-entropy on other targets from the second update on, with more of them than labels count."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        if self.state.global_step == 0:
            return outputs.loss
        return outputs.loss + 0.3 * ce(outputs.logits, inputs["input_ids"].flip(-1))


class WithLaterPenalty(InOrder):
    """A gradient penalty from the second update on."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        loss = model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"], labels=inputs["labels"]).loss
        if self.state.global_step == 0:
            return loss
        return loss + 10 * torch.autograd.grad(loss, embedded, create_graph=True)[0].square().sum()


@pytest.mark.parametrize(
    ("kind", "is_fused"), [(InOrder, True), (WithAccuracy, False), (WithLaterTarget, True), (WithLaterPenalty, True)]
)
def test_an_update_is_the_one_of_real_logits(
    kind: type[Any], is_fused: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    to_float = Tensor.float  # losses of transformers cast logits down; here they stay double
    monkeypatch.setattr(Tensor, "float", lambda t: t if t.dtype is torch.float64 else to_float(t))
    ids = torch.randint(5, 64, (8, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row.masked_fill(row % 3 == 0, -100)} for row in ids]  # nothing to lay out
    runs = []
    for speed in ("off", "max"):
        model = build("llama", "causal")
        if kind is WithLaterPenalty:
            model.set_attn_implementation("eager")  # torch's own kernels have no second derivative
        runs.append(train(model, data, tmp_path, kind=kind, speed=speed, max_steps=2, learning_rate=1e-3,
                          per_device_train_batch_size=4, gradient_accumulation_steps=1))  # fmt: skip
    plain, fused = runs
    assert fused.plan.linear_loss is is_fused, fused.plan.lines()
    assert fused.losses == pytest.approx(plain.losses, rel=1e-10)
    for name, gradient in plain.gradients.items():
        same(fused.gradients[name], gradient)
    head = fused.trainer._loopwright.run.speed._head
    assert head is None or not head.is_installed
    if kind is InOrder:
        assert not head.logits_were_used  # nothing holds them until the end of the update
