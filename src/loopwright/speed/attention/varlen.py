"""Varlen attention kernels for many short documents and shared key heads.

A program computes a few tokens of one document for all query heads that share a key head: keys are read once for all of
them, little of a tile is outside a short document, and the gradient of a key is summed in one program, so that results
are deterministic. For the backward pass, one number per token and head is kept: the logarithm of the sum of its
exponentials.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .attention_kernel import kernels
from .document_mask import as_mask
from .per_document import AttentionRequest, one_by_one

SIZES = (16, 32, 64, 128)
"""Supported head sizes, which fill tiles completely."""
ROOM, MOST_DOCUMENTS = 128, 4096
"""Programs search their document among all: kernels are compiled for at least 128, at most 4096 documents."""
TILE = 64
"""Rows of queries, and of keys, in a tile; a row is a token for one head."""
WARPS = 4
STAGES = {"forward": (3, 3), "queries": (3, 2), "keys": (3, 2)}
"""Pipeline stages, for head sizes up to 64 and for larger ones."""


class Shape(NamedTuple):
    """How heads are distributed among programs."""

    heads: int
    key_heads: int
    size: int
    sharing: int
    """Query heads per key head."""
    together: int
    """Query heads per program."""

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> Shape:
        heads, key_heads = query.shape[1], key.shape[1]
        sharing = heads // key_heads
        return cls(heads, key_heads, query.shape[2], sharing, min(sharing & -sharing, TILE // 16))

    @property
    def tokens(self) -> int:
        """Tokens in a tile of queries."""
        return TILE // self.together


@cache
def has_kernel() -> bool:
    """Whether the GPU supports these kernels (NVIDIA, Ampere or newer); also registers the operation with torch."""
    try:
        import triton
    except ImportError:
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 0):
        return False
    register()
    # Triton compiles its launcher on first use: a thread starts that early.
    _UNDER_WAY.append(Thread(target=lambda: triton.runtime.driver.active.get_current_device(), daemon=True))
    _UNDER_WAY[-1].start()
    return True


def takes(query: Tensor, value: Tensor, documents: int) -> bool:
    """Whether this head size and number of documents are supported."""
    return query.shape[-1] == value.shape[-1] and query.shape[-1] in SIZES and documents <= MOST_DOCUMENTS


# ---- operations -----------------------------------------------------------------------------------------------------


SIGNATURE = (
    "Tensor query, Tensor key, Tensor value, Tensor borders, Tensor seed{more}, bool causal, int window, float scale, "
    "float drop"
)
_LIBRARY: list[torch.library.Library] = []


@cache
def register() -> None:
    """Register the operation with torch and its compiler."""
    library = torch.library.Library("loopwright", "FRAGMENT")
    _LIBRARY.append(library)  # its definitions are removed with it
    saved = SIGNATURE.format(more=", Tensor output, Tensor sums")
    library.define(f"document_attention({SIGNATURE.format(more='')}) -> (Tensor, Tensor)")
    library.define(f"document_attention_backward(Tensor gradient, {saved}) -> (Tensor, Tensor, Tensor)")
    for name, run, empty in (
        ("document_attention", _forward, _empty_forward),
        ("document_attention_backward", _backward, _empty_backward),
    ):
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"loopwright::{name}", empty, lib=library)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:5], *output)
        ctx.rest = inputs[5:]

    def gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return _differentiable(ctx, gradient)
        found = torch.ops.loopwright.document_attention_backward(gradient, *ctx.saved_tensors, *ctx.rest)
        return (*found, *[None] * 6)

    torch.library.register_autograd("loopwright::document_attention", gradients, setup_context=keep, lib=library)


class _Attention(torch.autograd.Function):
    """The operation without torch's dispatcher, whose host time would exceed the kernels' time on a GPU."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output, sums = _forward(*inputs)
        ctx.save_for_backward(*inputs[:5], output, sums)
        ctx.rest = inputs[5:]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return _differentiable(ctx, gradient)
        return (*_backward(gradient, *ctx.saved_tensors, *ctx.rest), *[None] * 6)


def _differentiable(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """The gradients by torch's own operations, for double backward (`create_graph=True`)."""
    borders, (causal, window, scale, drop) = ctx.saved_tensors[3], ctx.rest
    if drop:
        raise RuntimeError(
            "attention with dropout does not support double backward; set attention_dropout=0 or speed='off'"
        )
    # Views, because the inputs may depend on each other: only the direct gradients are computed here.
    parts = [each.view_as(each) for each in ctx.saved_tensors[:3]]
    ask = AttentionRequest(causal, window or None, None, 0.0, scale, twice=True)
    row = one_by_one(*(each.transpose(0, 1).unsqueeze(0) for each in parts), as_mask(borders, 1), ask)
    found = torch.autograd.grad(row.squeeze(0), parts, gradient, create_graph=True, allow_unused=True)
    return (*found, *[None] * 6)


def attend(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, *, causal: bool, window: int, scale: float, drop: float
) -> Tensor:
    """Attention within each document, (tokens, heads, size) to the same; a window of 0 means none."""
    # Drawn on the device by torch's generator, so that a resumed run draws the same.
    seed = torch.randint(2**31 - 1, (1,), device=query.device, dtype=torch.int32) if drop else borders[:1]
    # Compilers and dispatch modes such as selective checkpointing must see the operation.
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.loopwright.document_attention(query, key, value, borders, seed, causal, window, scale, drop)[0]
    return _Attention.apply(query, key, value, borders, seed, causal, window, scale, drop)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, seed: Tensor, causal: bool, window: int, scale: float,
    drop: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    query, key, value = (_rows(each) for each in (query, key, value))
    output, sums = _empty_forward(query)
    job = Job(Shape.of(query, key), borders, seed, causal, window, scale, drop)
    _compile_ahead(job, query, key, value, output, sums)
    job.launch("forward", (query, key, value, output), sums)
    return output, sums


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, borders: Tensor, seed: Tensor, output: Tensor,
    sums: Tensor, causal: bool, window: int, scale: float, drop: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradient, query, key, value, output = (_rows(each) for each in (gradient, query, key, value, output))
    to_query, to_key, to_value = _empty_backward(gradient, query, key, value)
    inner = torch.empty_like(sums)
    job = Job(Shape.of(query, key), borders, seed, causal, window, scale, drop)
    _await(_UNDER_WAY)
    job.launch("queries", (query, key, value, output, gradient, to_query), sums, inner)
    job.launch("keys", (query, key, value, gradient, to_key, to_value), sums, inner)
    return to_query, to_key, to_value


def _empty_forward(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


def _empty_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _empty(query), _empty(key), _empty(value)


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous last dimension."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


# ---- launching ------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """The arguments that all kernels of one attention share."""

    shape: Shape
    borders: Tensor
    seed: Tensor
    causal: bool
    window: int
    scale: float
    drop: float

    def launch(self, name: str, tensors: tuple[Tensor, ...], *statistics: Tensor, only_compile: bool = False) -> None:
        """Run a kernel on tensors of (tokens, heads, size), then statistics of (heads, tokens)."""
        shape, query = self.shape, tensors[0]
        documents, tokens = self.borders.numel() - 1, query.shape[0]
        strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
        per_block, heads = (TILE, shape.key_heads) if name == "keys" else (shape.tokens, shape.heads // shape.together)
        grid = ((tokens + per_block - 1) // per_block + documents, heads)
        kernel = kernels()[name]
        with torch.cuda.device_of(query):
            (partial(kernel.warmup, grid=grid) if only_compile else kernel[grid])(
                *tensors, *statistics, self.borders, self.seed, documents, tokens, self.scale, self.drop, *strides,
                G=shape.together, SHARING=shape.sharing, D=shape.size, T=shape.tokens, N=TILE, CAUSAL=self.causal,
                WINDOW=self.window, DROP=self.drop > 0, ROOM=room_for(documents),
                WIDE=tokens * max(strides) >= 2**31, num_warps=WARPS, num_stages=STAGES[name][shape.size > 64],
            )  # fmt: skip


def room_for(documents: int) -> int:
    """The number of documents a kernel is compiled for: a power of two."""
    return max(ROOM, 1 << (documents - 1).bit_length())


_UNDER_WAY: list[Thread] = []
_PREPARING: list[Thread] = []
_SEEN: set[Any] = set()


def _compile_ahead(job: Job, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor) -> None:
    """Compile the kernels of a new kind of backward pass in threads during the forward: each takes a second."""
    _await(_PREPARING)
    if _is_new(job, query.dtype):
        _compile_backward(job, query, key, value, output, sums)


def _is_new(job: Job, dtype: torch.dtype) -> bool:
    """Whether kernels of this kind were not compiled yet; they are from now on."""
    kind = (job.shape, dtype, job.causal, job.window, job.drop > 0, room_for(job.borders.numel() - 1))
    is_known = kind in _SEEN
    _SEEN.add(kind)
    return not is_known


def prepare(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, *, causal: bool, window: int) -> None:
    """Compile the kernels for such rows in bfloat16, in threads: a proof in single precision comes before that."""
    with suppress(Exception):  # the actual launch raises the error
        job = Job(Shape.of(query, key), borders, borders[:1], causal, window, 1.0, 0.0)
        if _is_new(job, torch.bfloat16):
            rows = [torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device=x.device)
                    for x in (query, key, value)]  # fmt: skip
            _PREPARING.append(Thread(target=_compile_all, args=(job, *map(_rows, rows)), daemon=True))
            _PREPARING[-1].start()


def _compile_all(job: Job, query: Tensor, key: Tensor, value: Tensor) -> None:
    output, sums = _empty_forward(query)
    _compile_backward(job, query, key, value, output, sums)
    with suppress(Exception):  # the actual launch raises the error
        job.launch("forward", (query, key, value, output), sums, only_compile=True)


def _compile_backward(job: Job, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor) -> None:
    _await(_UNDER_WAY)
    kernels()
    for name, tensors in (
        ("queries", (query, key, value, output, output, query)),
        ("keys", (query, key, value, output, key, value)),
    ):
        _UNDER_WAY.append(Thread(target=_quietly, args=(job, name, tensors, sums), daemon=True))
        _UNDER_WAY[-1].start()


def _await(threads: list[Thread]) -> None:
    while threads:
        threads.pop().join()


def _quietly(job: Job, name: str, tensors: tuple[Tensor, ...], sums: Tensor) -> None:
    with suppress(Exception):  # the actual launch raises the error
        job.launch(name, tensors, sums, sums, only_compile=True)
