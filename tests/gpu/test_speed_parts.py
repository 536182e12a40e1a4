"""The parts of `speed/` that need a GPU.

Also runs without pytest: `python tests/gpu/test_speed_parts.py`. Words after the name choose tests; each prints
what it measured, and a failure does not stop the others.
"""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

from loopwright.speed.cuda_graphs.recorder import GraphedStep
from loopwright.speed.device import fp8, fused_step
from loopwright.speed.device.clipping import FoldedClip, cannot_fold
from loopwright.speed.device.prefetch import Prefetch
from tests.gpu.script import needs_gpu, run_tests

pytestmark = needs_gpu()

GPU = torch.device("cuda", 0)


def say(text: str) -> None:
    print(f"        {text}", flush=True)


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Every wait of the host for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def milliseconds(once: Callable[[], Any], rounds: int = 20, warm: int = 3) -> float:
    """Wall time of one round, the device's work included; the best of three series."""
    for _ in range(warm):
        once()
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            once()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / rounds * 1e3)
    return min(found)


def distance(mine: list[Tensor], theirs: list[Tensor]) -> float:
    """|mine - theirs| / |theirs| of all tensors together."""
    off = sum((a.double() - b.double()).square().sum() for a, b in zip(mine, theirs, strict=True))
    return float((off / sum(b.double().square().sum() for b in theirs)).sqrt())


# ---- prefetch -------------------------------------------------------------------------------------------------------


def some_batch(number: int) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(number)
    floats = torch.randn(64, 300, generator=draws)
    return {
        "ids": torch.randint(0, 1000, (64, 300), generator=draws),
        "pinned": floats.pin_memory(),
        "deep": [floats.t(), (floats > 0, "text", 7)],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float(number)),
        "half": floats.bfloat16(),
    }


def tensors_of(batch: dict[str, Any]) -> list[Tensor]:
    deep = batch["deep"]
    return [batch["ids"], batch["pinned"], deep[0], deep[1][0], batch["empty"], batch["scalar"], batch["half"]]


def test_prefetched_batches_are_equal_and_nobody_waits() -> None:
    for limit in (512 * 2**20, 1):  # all at once; each only when the one before is taken
        ahead, matrix = Prefetch(GPU, ahead=limit), torch.randn(4096, 4096, device=GPU)
        updates = [[some_batch(10 * update + index) for index in range(4)] for update in range(12)]
        expected = [[[t.clone() for t in tensors_of(batch)] for batch in update] for update in updates]
        moved: list[list[list[Tensor]]] = []
        with nobody_waits():
            for update in updates:
                ahead.begin(update)
                moved.append([])
                for batch in update:
                    moved[-1].append([ahead.take(tensor) for tensor in tensors_of(batch)])
                    for tensor in tensors_of(batch):  # a loader that reuses its memory; pinned copies may be in flight
                        if not tensor.is_pinned():
                            tensor.zero_()
                    matrix = matrix @ matrix * 1e-4  # keeps the compute stream behind
        torch.cuda.synchronize()
        for mine, theirs in zip(moved, expected, strict=True):
            for found, sent in zip(mine, theirs, strict=True):
                for a, b in zip(found, sent, strict=True):
                    assert a.device == GPU and a.dtype == b.dtype and torch.equal(a.cpu(), b), (limit, b.shape)
        say(f"prefetch: limit {limit}: 12 updates x 4 batches equal, {len(ahead._staging)} staging buffers")


def test_large_batches_have_arrived_when_computing_begins() -> None:
    """Read at once on an idle compute stream: without waiting, it would read memory before the copy."""
    for pinned in (True, False):
        ahead, found, expected = Prefetch(GPU), [], []
        for update in range(10):
            images = torch.randn(64, 3, 224, 224, generator=torch.Generator().manual_seed(update))
            images = images.pin_memory() if pinned else images
            expected.append(images.double().sum())
            ahead.begin([{"images": images}])
            found.append(ahead.take(images).double().sum())
        assert torch.allclose(torch.stack(found).cpu(), torch.stack(expected), rtol=1e-9), pinned


def test_a_tensor_changed_after_it_was_announced_is_sent_anew() -> None:
    ahead, tensor = Prefetch(GPU), torch.ones(1000)
    ahead.begin([{"x": tensor}])
    tensor.mul_(2)
    assert ahead.take(tensor).eq(2).all()
    ahead.begin([{"x": tensor}])
    first, second = ahead.take(tensor), ahead.take(tensor)
    first.zero_()  # two users of one tensor have two copies
    assert second.eq(2).all()


def test_copies_overlap_with_computation() -> None:
    matrix, batches = torch.randn(8192, 8192, device=GPU), [{"x": torch.randn(2**24)} for _ in range(4)]

    def work() -> None:
        for _ in range(4):
            torch.mm(matrix, matrix)

    def plain() -> None:
        for batch in batches:
            batch["x"].to(GPU)
            work()

    ahead = Prefetch(GPU)

    def prefetched() -> None:
        ahead.begin(batches)
        for batch in batches:
            ahead.take(batch["x"])
            work()

    numbers = [milliseconds(each, rounds=5) for each in (plain, prefetched, lambda: [work() for _ in range(4)])]
    plain_ms, ahead_ms, alone = numbers
    say(f"prefetch: 4 x 64 MiB: copy, then compute {plain_ms:.1f} ms, ahead {ahead_ms:.1f}, compute alone {alone:.1f}")
    assert ahead_ms < 1.05 * plain_ms, "copying ahead costs more than it hides"


# ---- clipping -------------------------------------------------------------------------------------------------------


def step_of(optimizer: Any) -> bool:
    optimizer.step()
    return True


def test_folded_clipping_takes_the_same_steps() -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        torch.manual_seed(0)
        sizes = ((512, 700), (33,), (), (65, 3, 4))
        ours = [nn.Parameter(torch.randn(size, device=GPU)) for size in sizes]
        theirs = copy.deepcopy(ours)
        folded, plain = (kind(each, lr=1e-2, weight_decay=0.1, fused=True) for each in (ours, theirs))
        assert cannot_fold(folded, ours) is None
        fold = FoldedClip(folded, step_of)
        with nobody_waits():
            for number in range(100):
                for a, b in zip(ours, theirs, strict=True):
                    a.grad = 10.0 ** (number % 5 - 4) * torch.randn_like(a)
                    b.grad = a.grad.clone()
                mine, reference = fold.clip(ours, 1.0), nn.utils.clip_grad_norm_(theirs, 1.0)
                fold.step(folded)
                plain.step()
        assert torch.equal(mine, reference)
        off = max(distance([a.detach()], [b.detach()]) for a, b in zip(ours, theirs, strict=True))
        back = distance([p.grad for p in ours], [p.grad for p in theirs])
        say(f"clip: {kind.__name__}, 100 steps: parameters differ by {off:.1e}, gradients written back by {back:.1e}")
        assert off < 1e-6 and back < 1e-6


def test_a_veto_stops_a_folded_step() -> None:
    parameter = nn.Parameter(torch.ones(5, device=GPU))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    fold = FoldedClip(optimizer, step_of)
    parameter.grad = torch.full_like(parameter, 100.0)
    fold.clip([parameter], 1.0)
    optimizer.found_inf = torch.ones((), device=GPU)
    fold.step(optimizer)
    assert parameter.eq(1).all()


def test_time_of_folded_clipping() -> None:
    sizes = [(4096, 2048)] * 24
    for dtype in (torch.float32, torch.bfloat16):
        own = [nn.Parameter(torch.randn(size, device=GPU, dtype=dtype)) for size in sizes]
        for parameter in own:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(own, fused=True)
        fold = FoldedClip(optimizer, step_of)

        def folded(fold: Any = fold, own: Any = own, optimizer: Any = optimizer) -> None:
            fold.clip(own, 1.0)
            fold.step(optimizer)

        def plain(own: Any = own, optimizer: Any = optimizer) -> None:
            nn.utils.clip_grad_norm_(own, 1.0)
            optimizer.step()

        both = [milliseconds(each) for each in (plain, folded, plain, folded)]
        count = sum(p.numel() for p in own) / 1e6
        times = f"{min(both[::2]):.2f} ms clip + step, {min(both[1::2]):.2f} ms folded"
        say(f"clip: {count:.0f}M parameters {dtype}: {times}")
        assert min(both[1::2]) < 1.05 * min(both[::2]), "folding costs more than it saves"
        del own, optimizer, fold, folded, plain
        gc.collect()


# ---- the optimizer step ---------------------------------------------------------------------------------------------


def two_groups(kind: Any, dtype: torch.dtype) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    own = [nn.Parameter(torch.randn(size, device=GPU, dtype=dtype)) for size in ((512, 700), (33,), (), (65, 3, 4))]
    groups = [{"params": own[:2], "weight_decay": 0.1}, {"params": own[2:], "weight_decay": 0.0}]
    return own, kind(groups, lr=1e-2, fused=True)


def test_a_step_with_fewer_calls_gives_the_same_bits() -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        for dtype in (torch.float32, torch.bfloat16):
            (ours, mine), (theirs, plain) = (two_groups(kind, dtype) for _ in range(2))
            assert fused_step._hooks(mine) is not None
            for number in range(20):
                torch.manual_seed(number)
                for a, b in zip(ours, theirs, strict=True):
                    a.grad = torch.randn_like(a)
                    b.grad = a.grad.clone()
                assert number == 0 or fused_step._calls(mine) is not None
                fused_step.step_(mine)
                plain.step()
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (kind, dtype)
            states = zip(map(mine.state.get, ours), map(plain.state.get, theirs), strict=True)
            assert all(torch.equal(a[name], b[name]) for a, b in states for name in b), (kind, dtype)
            with nobody_waits():
                fused_step.step_(mine)


def test_time_of_a_step_with_fewer_calls() -> None:
    own, optimizer = two_groups(torch.optim.AdamW, torch.float32)
    for parameter in own:
        parameter.grad = torch.randn_like(parameter)
    both = [milliseconds(each, rounds=200) for each in (optimizer.step, lambda: fused_step.step_(optimizer)) * 2]
    say(f"step: {1e3 * min(both[::2]):.0f} us by torch, {1e3 * min(both[1::2]):.0f} with fewer calls")


# ---- graphs ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)
        x = self.first(x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))))
        return self.second(x + self.dropout(self.down(nn.functional.gelu(self.up(x)))))


class Encoder(nn.Module):
    """BERT-base in size and shape, without its mask."""

    def __init__(self, layers: int = 12, width: int = 768, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30522, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, width // 64, dropout) for _ in range(layers))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, 2)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(self.words(input_ids) + self.places.weight[: input_ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x[:, 0]).float(), labels)


def runner(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Any:
    def run(inputs: dict[str, Any], weight: Any) -> Tensor:
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
            loss = model(**inputs)
        loss = loss * weight
        loss.backward()
        return loss.detach()

    return run


def tokens(rows: int, length: int, number: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 30522, (rows, length), generator=draws)
    return {"input_ids": ids.to(GPU), "labels": torch.randint(0, 2, (rows,), generator=draws).to(GPU)}


def compare_with_eager(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model, told = Encoder(layers=4, width=256).to(GPU), []
    other = copy.deepcopy(model)
    step, eager = GraphedStep(runner(model, dtype), model, tell=told.append), runner(other, dtype)
    worst = {"loss": 0.0, "gradient": 0.0}
    for update in range(4):
        for index, (rows, length) in enumerate(((24, 128), (48, 64), (24, 128), (16, 192))):
            inputs, weight = tokens(rows, length, 10 * update + index), (0.5, torch.tensor(0.25, device=GPU))[index % 2]
            state = torch.cuda.get_rng_state(GPU)
            mine = step.step(inputs, weight)
            after = torch.cuda.get_rng_state(GPU)
            torch.cuda.set_rng_state(state, GPU)
            theirs = eager(inputs, weight)
            assert torch.equal(after, torch.cuda.get_rng_state(GPU)), "a replay moves the random stream differently"
            worst["loss"] = max(worst["loss"], distance([mine], [theirs]))
        pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True)]
        assert all((a is None) == (b is None) for a, b in pairs)
        grads = [(a, b) for a, b in pairs if a is not None]
        worst["gradient"] = max(worst["gradient"], distance([a for a, _ in grads], [b for _, b in grads]))
        for parameter in [*model.parameters(), *other.parameters()]:
            parameter.grad = None
    assert told == [] and len(step._graphs) == 3, told
    found = f"losses differ by {worst['loss']:.1e}, gradients by {worst['gradient']:.1e}"
    say(f"graph: {dtype}: 3 shapes, 16 micro-batches: {found}")
    assert worst["loss"] <= tolerance and worst["gradient"] <= 10 * tolerance, worst
    same = tokens(24, 128, 0)
    first, second = step.step(same), step.step(same)
    assert not torch.equal(first, second), "dropout does not advance"


def test_replays_equal_eager_runs_in_float32() -> None:
    compare_with_eager(torch.float32, 1e-5)


def test_replays_equal_eager_runs_in_bfloat16() -> None:
    compare_with_eager(torch.bfloat16, 1e-3)


def test_nobody_waits_for_replays() -> None:
    model = Encoder(layers=2, width=128).to(GPU)
    step = GraphedStep(runner(model), model, tell=print)
    batches = [tokens(8, 64, number) for number in range(6)]
    for batch in batches[:3]:
        step.step(batch, 0.5)
    half = torch.tensor(0.5, device=GPU)  # a copy that waits
    with nobody_waits():
        losses = [step.step(batch, 0.5) for batch in batches]
        for parameter in model.parameters():
            parameter.grad = None
        step.step(batches[0], half)
    assert torch.stack(losses).isfinite().all()


class Looks(Encoder):
    """Asks the device for a number in every forward."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(input_ids, labels)
        return loss * 2 if loss.item() > 1e9 else loss


class Synchronizes(Encoder):
    """Waits in a way that torch's debug mode does not see: it breaks the recording itself."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(input_ids, labels)
        torch.cuda.synchronize()
        return loss


def test_what_cannot_be_recorded_trains_eagerly_and_breaks_nothing() -> None:
    for kind in (Looks, Synchronizes):
        told: list[str] = []
        model = kind(layers=2, width=128).to(GPU)
        step = GraphedStep(runner(model), model, tell=told.append)
        losses = [step.step(tokens(8, 64, number)) for number in range(3)]
        assert torch.stack(losses).isfinite().all() and len(told) == 1 and step.reason, told
        say(f"graph: {kind.__name__}: {told[0][:110]}")
        # Random numbers, the allocator and later recordings work as before.
        assert nn.functional.dropout(torch.ones(1000, device=GPU)).eq(0).any()
        torch.cuda.empty_cache()
        sound = Encoder(layers=2, width=128).to(GPU)
        again = GraphedStep(runner(sound), sound, tell=told.append)
        again.step(tokens(8, 64, 0)), again.step(tokens(8, 64, 1))
        assert len(told) == 1 and len(again._graphs) == 1, told


def test_training_with_graphs_follows_eager_training() -> None:
    torch.manual_seed(0)
    models = [Encoder(layers=4, width=256, dropout=0.0).to(GPU)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-4, fused=True) for model in models]
    folds = [FoldedClip(optimizer, step_of) for optimizer in optimizers]
    steps = [GraphedStep(runner(models[0]), models[0], tell=print).step, runner(models[1])]
    curves: list[list[Tensor]] = [[], []]
    for number in range(30):
        batch = tokens(24, 128, number % 5)
        for model, step, optimizer, fold, curve in zip(models, steps, optimizers, folds, curves, strict=True):
            curve.append(step(batch, 1.0))
            fold.clip(list(model.parameters()), 1.0)
            fold.step(optimizer)
            for parameter in model.parameters():
                parameter.grad = None
    off = max(abs(float(a) - float(b)) for a, b in zip(*curves, strict=True))
    say(f"graph: 30 updates: losses differ by at most {off:.1e}, last {float(curves[0][-1]):.4f}")
    assert off < 2e-2 and torch.equal(models[0].unused, models[1].unused)


def test_time_of_graphs() -> None:
    model = Encoder().to(GPU)
    own = list(model.parameters())
    batch, eager = tokens(24, 128, 0), runner(model)
    step = GraphedStep(eager, model, tell=print)
    start = time.perf_counter()
    step.step(batch), step.step(tokens(24, 128, 1))
    torch.cuda.synchronize()
    ready = time.perf_counter() - start
    optimizer = torch.optim.AdamW(own, 1e-5, fused=True)
    fold = FoldedClip(optimizer, step_of)

    def update(run: Callable[..., Any]) -> Callable[[], None]:
        def once() -> None:
            run(batch, 1.0)
            fold.clip(own, 1.0)
            fold.step(optimizer)
            for parameter in own:
                parameter.grad = None

        return once

    rows = {
        "forward+backward": [milliseconds(lambda run=run: run(batch, 1.0)) for run in (eager, step.step)],
        "update": [milliseconds(update(run)) for run in (eager, step.step)],
    }
    for name, (plain, graphed) in rows.items():
        say(f"graph: 12 x 768 encoder, 3,072 tokens, {name}: eager {plain:.2f} ms, graph {graphed:.2f} ms")
        assert graphed < 1.05 * plain, name
    say(f"graph: first two steps, recorded and checked, took {ready:.2f} s")
    for block in model.blocks:
        block.compile()
    compiled = milliseconds(update(eager), warm=5)
    recorded = GraphedStep(eager, model, tell=say)
    both = milliseconds(update(recorded.step), warm=5)
    say(f"graph: with compiled blocks: {compiled:.2f} ms an update, also as a graph {both:.2f} ms ({recorded.reason})")
    assert both < 1.1 * compiled


def test_time_between_replays() -> None:
    """Updates that follow each other: one graph for forward and backward, and one for each of them."""

    def trained(divides: bool) -> tuple[float, float, list[Tensor]]:
        torch.manual_seed(0)
        model, told = Encoder(layers=12, width=256).to(GPU), []
        own, steps = list(model.parameters()), []

        def run(inputs: dict[str, Any], weight: Any) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**inputs) * weight
            if divides:
                steps[0].divide()
            loss.backward()
            return loss.detach()

        steps.append(GraphedStep(run, model, tell=told.append))
        steps[0].overwrites = True
        optimizer = torch.optim.AdamW(own, 1e-5, fused=True)
        batch, losses = tokens(64, 128, 0), []

        def update() -> None:
            losses.append(steps[0].step(batch, 1.0))
            optimizer.step()
            for parameter in own:
                parameter.grad = None

        together = milliseconds(update)

        def apart() -> None:
            update()
            torch.cuda.synchronize()

        assert told == [], told
        return together, milliseconds(apart), losses[:10]

    whole, both = trained(divides=False), trained(divides=True)
    off = max(distance([a], [b]) for a, b in zip(whole[2], both[2], strict=True))
    say(
        f"graph: 12 x 256 encoder, updates one after another: one graph {whole[0]:.3f} ms, two {both[0]:.3f} ms; "
        f"waiting after each: {whole[1]:.3f} and {both[1]:.3f} ms; losses differ by {off:.1e}"
    )
    assert off < 1e-2 and both[0] < 1.03 * whole[0]


# ---- fp8 ------------------------------------------------------------------------------------------------------------


def has_fp8() -> bool:
    try:
        fp8.refuse_without_fp8(GPU)
    except Exception as error:
        say(str(error))
        return False
    return True


def test_fp8_products_are_near_and_fast() -> None:
    if not has_fp8():
        return
    torch.manual_seed(0)
    for rows in (16384, 1000):
        plain = nn.Linear(2048, 8192, device=GPU)
        ours = copy.deepcopy(plain)
        ours.forward = MethodType(fp8.fp8_forward, ours)
        x = torch.randn(rows, 2048, device=GPU)
        gradient = torch.randn(rows, 8192, device=GPU)
        inputs = [x.clone().requires_grad_() for _ in range(3)]
        exact = plain(inputs[0])
        exact.backward(gradient)
        reference = [exact.detach(), inputs[0].grad, plain.weight.grad, plain.bias.grad]
        found = []
        for layer, each in ((plain, inputs[1]), (ours, inputs[2])):
            layer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = layer(each)
            out.backward(gradient.bfloat16())
            assert out.dtype is torch.bfloat16 and layer.weight.grad.dtype is torch.float32
            found.append([out.detach(), each.grad, layer.weight.grad, layer.bias.grad])
        names = ("output", "input gradient", "weight gradient", "bias gradient")
        for name, expected, half, eight in zip(names, reference, *found, strict=True):
            errors = distance([half], [expected]), distance([eight], [expected])
            say(f"fp8: {rows} x 2048 -> 8192, {name}: error {errors[1]:.1e} (bf16 {errors[0]:.1e})")
            assert errors[1] < 0.1


def test_fp8_kernels_compute_what_the_emulation_says() -> None:
    if not has_fp8():
        return
    x, w, g = (torch.randn(size, device=GPU) for size in ((256, 128), (512, 128), (256, 512)))
    x8, xs = fp8.as_rows(x, fp8.VALUES)
    w8, ws = fp8.as_rows(w, fp8.VALUES)
    g8, g8t, gs = fp8.as_both(g, fp8.GRADIENTS)
    for kind in (torch.bfloat16, torch.float32):
        for a, b, sa, sb in (
            (x8, w8.t(), xs, ws),
            (g8, fp8.as_columns(w, ws, fp8.VALUES).t(), gs, ws),
            (g8t, fp8.as_columns(x, xs, fp8.VALUES).t(), gs, xs),
        ):
            for fast in (True, False):
                mine = fp8.scaled_product(a, b, sa, sb, dtype=kind, fast=fast)
                theirs = fp8.dequantised_product(a, b, sa, sb)
                assert distance([mine], [theirs]) < 1e-2, (kind, fast, distance([mine], [theirs]))


def test_time_of_fp8() -> None:
    if not has_fp8():
        return
    state = torch.cuda.get_rng_state(GPU)
    for count in (16384, 2720):
        measure = fp8.measured_on(GPU, count, weight=torch.float32, compute=torch.bfloat16)
        for size in ((2048, 8192), (8192, 2048), (2048, 2048), (2048, 512), (768, 3072)):
            start = time.perf_counter()
            timing = measure(*size)
            spent = time.perf_counter() - start
            say(
                f"fp8: {count} tokens, {size[0]} -> {size[1]}: bf16 {timing.plain:.3f} ms, fp8 {timing.fp8:.3f} ms "
                f"({'wins' if timing.wins else 'stays'}; measured in {spent:.1f} s)"
            )
    assert torch.equal(state, torch.cuda.get_rng_state(GPU)), "measuring moved the random numbers of the run"


def test_fp8_inside_compiled_blocks() -> None:
    if not has_fp8():
        return
    torch.manual_seed(0)
    model = nn.ModuleList(Block(1024, 16, 0.0) for _ in range(2)).to(GPU)
    plain = copy.deepcopy(model)
    found = fp8.use_fp8(model, lambda *size: fp8.Timing(2.0, 1.0))
    assert len(found.layers) == 8
    for block in [*model, *plain]:
        block.compile()
    x, sums = torch.randn(8, 512, 1024, device=GPU), []
    for blocks in (model, plain):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = blocks[1](blocks[0](x))
        out.float().square().mean().backward()
        sums.append([out.detach(), *[p.grad for p in blocks.parameters()]])
    off = [distance([a], [b]) for a, b in zip(*sums, strict=True)]
    gradients = distance(sums[0][1:], sums[1][1:])
    say(f"fp8: two compiled blocks: output differs by {off[0]:.1e}, gradients by {gradients:.1e}")
    assert off[0] < 0.1 and gradients < 0.2


# ---- in the trainer -------------------------------------------------------------------------------------------------


def test_the_trainer_folds_prefetches_and_does_not_wait() -> None:
    from loopwright import Trainer, TrainerCallback
    from tests.gpu.test_one_gpu import NextToken, NoWaiting, losses, train
    from tests.models import TASKS

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pass

    torch.manual_seed(0)
    model, data = NextToken(), TASKS["llama"].data(192)
    curves = []
    for callbacks, extra in (([Look()], {}), ([], {}), ([], {"dataloader_pin_memory": False})):
        trainer = train(
            copy.deepcopy(model), data, callbacks=callbacks, num_train_epochs=1, gradient_accumulation_steps=2,
            max_grad_norm=0.05, **extra,
        )  # fmt: skip
        assert isinstance(trainer, Trainer) and (trainer._loopwright.strategy._clip is not nn.utils.clip_grad_norm_)
        curves.append(losses(trainer))
    for other in curves[1:]:
        off = max(abs(a - b) / abs(b) for a, b in zip(curves[0], other, strict=True))
        assert off < 1e-5, off
    say(f"trainer: clipped before and in the step: losses differ by at most {off:.1e}")
    try:
        train(copy.deepcopy(model), data, callbacks=[NoWaiting()], max_steps=20, logging_steps=20, num_train_epochs=1,
              gradient_accumulation_steps=2, dataloader_pin_memory=False)  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_trainer_takes_fp8() -> None:
    if not has_fp8():
        return
    from loopwright import Trainer, TrainingArguments

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4096, 16384), nn.Linear(16384, 4096)])

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return {"loss": (x.float().mean(-1) - labels).pow(2).mean()}

    data = [{"x": torch.randn(512, 4096), "labels": torch.zeros(512)} for _ in range(32)]
    args = TrainingArguments(
        tempfile.mkdtemp(), fp8=True, bf16=True, max_steps=4, per_device_train_batch_size=16, save_strategy="no",
        disable_tqdm=True, logging_steps=1, report_to="none",
    )  # fmt: skip
    trainer = Trainer(Wide(), args, train_dataset=data)
    trainer.train()
    rows = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    timings = {size: (round(t.plain, 2), round(t.fp8, 2)) for size, t in trainer._loopwright.fp8.timings.items()}
    told = trainer._loopwright.notices.told
    say(f"trainer: fp8: {timings} ms, losses {[round(each, 5) for each in rows]}, told {told}")
    assert len(rows) == 4 and not any("forward" in layer.__dict__ for layer in trainer.model.layers)


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
