"""Varlen attention kernels for many short documents and shared key heads.

A program computes a few tokens of one document for all query heads that share a key head: keys are read once for all of
them, little of a tile is outside a short document, and the gradient of a key is summed in one program, so that results
are deterministic. For the backward pass, one number per token and head is kept: the logarithm of the sum of its
exponentials. Keys may be those of another row, with documents of other lengths (cross-attention), and a bias for the
distance between key and query may be added to the scores (T5).
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .attention_kernel import kernels
from .per_document import AttentionRequest, each_document

SIZES = (16, 32, 64, 128)
"""Supported head sizes, which fill tiles completely."""
ROOM, MOST_DOCUMENTS = 128, 4096
"""Programs search their document among all: kernels are compiled for at least 128, at most 4096 documents."""
TILE = 64
"""Rows of queries, and of keys, in a tile; a row is a token for one head."""
WARPS = 4
STAGES = {"forward": (3, 3), "queries": (3, 2), "keys": (3, 2), "bias": (2, 1)}
"""Pipeline stages, for head sizes up to 64 and for larger ones."""
BIAS_PARTS = 4
"""Parts of the documents over which the gradient of a bias is summed at the same time."""


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
    "Tensor query, Tensor key, Tensor value, Tensor bias, Tensor borders, Tensor key_borders, Tensor seed{more}, "
    "bool causal, int window, float scale, float drop"
)
TENSORS = 7
"""Of them are tensors; an empty bias means none."""
_LIBRARY: list[torch.library.Library] = []


@cache
def register() -> None:
    """Register the operation with torch and its compiler."""
    library = torch.library.Library("loopwright", "FRAGMENT")
    _LIBRARY.append(library)  # its definitions are removed with it
    saved = SIGNATURE.format(more=", Tensor output, Tensor sums")
    library.define(f"document_attention({SIGNATURE.format(more='')}) -> (Tensor, Tensor)")
    library.define(f"document_attention_backward(Tensor gradient, {saved}) -> (Tensor, Tensor, Tensor, Tensor)")
    for name, run, empty in (
        ("document_attention", _forward, _empty_forward),
        ("document_attention_backward", _backward, _empty_backward),
    ):
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"loopwright::{name}", empty, lib=library)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:TENSORS], *output)
        ctx.rest = inputs[TENSORS:]

    def gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return _differentiable(ctx, gradient)
        found = torch.ops.loopwright.document_attention_backward(gradient, *ctx.saved_tensors, *ctx.rest)
        return (*found, *[None] * 7)

    torch.library.register_autograd("loopwright::document_attention", gradients, setup_context=keep, lib=library)


class _Attention(torch.autograd.Function):
    """The operation without torch's dispatcher, whose host time would exceed the kernels' time on a GPU."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output, sums = _forward(*inputs)
        ctx.save_for_backward(*inputs[:TENSORS], output, sums)
        ctx.rest = inputs[TENSORS:]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return _differentiable(ctx, gradient)
        return (*_backward(gradient, *ctx.saved_tensors, *ctx.rest), *[None] * 7)


def _differentiable(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """The gradients by torch's own operations, for double backward (`create_graph=True`)."""
    (borders, key_borders), (causal, window, scale, drop) = ctx.saved_tensors[4:6], ctx.rest
    if drop:
        raise RuntimeError(
            "attention with dropout does not support double backward; set attention_dropout=0 or speed='off'"
        )
    # Views, because the inputs may depend on each other: only the direct gradients are computed here.
    parts = [each.view_as(each) for each in ctx.saved_tensors[:4]]
    ask = AttentionRequest(causal, window or None, None, 0.0, scale, twice=True)
    rows = [each.transpose(0, 1).unsqueeze(0) for each in parts[:3]]
    bias = parts[3] if parts[3].numel() else None
    row = each_document(*rows, borders, key_borders, ask, bias=bias)
    found = torch.autograd.grad(row.squeeze(0), parts, gradient, create_graph=True, allow_unused=True)
    return (*found, *[None] * 7)


def attend(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, *, causal: bool, window: int, scale: float, drop: float,
    key_borders: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention within each document, (tokens, heads, size) to the same; a window of 0 means none.

    `key_borders` are the documents of the keys, if these are of another row. `bias`, (heads, distances), is added to
    the scores by the distance between key and query; there are as many distances before 0 as after it.
    """
    # Drawn on the device by torch's generator, so that a resumed run draws the same.
    seed = torch.randint(2**31 - 1, (1,), device=query.device, dtype=torch.int32) if drop else borders[:1]
    bias = query.new_empty(0, dtype=torch.float32) if bias is None else bias.float().contiguous()
    rows = (query, key, value, bias, borders, borders if key_borders is None else key_borders, seed)
    # Compilers and dispatch modes such as selective checkpointing must see the operation.
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.loopwright.document_attention(*rows, causal, window, scale, drop)[0]
    return _Attention.apply(*rows, causal, window, scale, drop)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, borders: Tensor, key_borders: Tensor, seed: Tensor,
    causal: bool, window: int, scale: float, drop: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    query, key, value = (_rows(each) for each in (query, key, value))
    output, sums = _empty_forward(query)
    job = Job(Shape.of(query, key), bias, borders, key_borders, seed, causal, window, scale, drop)
    _compile_ahead(job, query, key, value, output, sums)
    job.launch("forward", (query, key, value, output), sums)
    return output, sums


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, borders: Tensor, key_borders: Tensor,
    seed: Tensor, output: Tensor, sums: Tensor, causal: bool, window: int, scale: float, drop: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gradient, query, key, value, output = (_rows(each) for each in (gradient, query, key, value, output))
    to_query, to_key, to_value, to_bias = _empty_backward(gradient, query, key, value, bias)
    inner = torch.empty_like(sums)
    job = Job(Shape.of(query, key), bias, borders, key_borders, seed, causal, window, scale, drop)
    _await(_UNDER_WAY)
    job.launch("queries", (query, key, value, output, gradient, to_query), sums, inner)
    job.launch("keys", (query, key, value, gradient, to_key, to_value), sums, inner)
    if bias.numel():
        tiles = query.new_empty(BIAS_PARTS, job.shape.heads, job.diagonals, TILE, TILE, dtype=torch.float32)
        job.launch("bias", (query, key, value, gradient), tiles, sums, inner)
        to_bias = by_distance(tiles, bias.shape[1])
    return to_query, to_key, to_value, to_bias


def by_distance(tiles: Tensor, distances: int) -> Tensor:
    """Sums over the diagonals of tiles, (heads, distances), of sums of tiles: (parts, heads, diagonals, rows, columns).

    The first tile is the furthest below the diagonal; distances that no tile has are 0.
    """
    size = tiles.shape[-1]
    turned = tiles.sum(0).flip(-2)
    # With rows one element longer than the tile's, what was a diagonal becomes a column.
    skewed = F.pad(turned, (0, size)).flatten(-2)[..., : size * (2 * size - 1)].unflatten(-1, (size, 2 * size - 1))
    halves = F.pad(skewed.sum(-2), (0, 1)).unflatten(-1, (2, size))
    summed = F.pad(halves[:, :, 0], (0, 0, 0, 1)) + F.pad(halves[:, :, 1], (0, 0, 1, 0))
    flat = summed.flatten(1)
    return F.pad(flat, (0, distances - flat.shape[1]))


def _empty_forward(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


def _empty_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(query), _empty(key), _empty(value), _empty(bias)


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous last dimension."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


# ---- launching ------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """The arguments that all kernels of one attention share."""

    shape: Shape
    bias: Tensor
    borders: Tensor
    key_borders: Tensor
    seed: Tensor
    causal: bool
    window: int
    scale: float
    drop: float

    @property
    def is_cross(self) -> bool:
        """Whether the documents of keys are others than those of queries."""
        return bool(self.borders.data_ptr() != self.key_borders.data_ptr())

    @property
    def diagonals(self) -> int:
        """How many distances from the diagonal tiles of scores have."""
        blocks: int = (self.bias.shape[1] + 1) // 2 // TILE
        return blocks if self.causal else 2 * blocks - 1

    def _grid(self, name: str, tokens: int, keys: int) -> tuple[int, ...]:
        shape, documents = self.shape, self.borders.numel() - 1
        if name == "bias":
            return (self.diagonals, shape.heads, BIAS_PARTS)
        if name == "keys":
            return ((keys + TILE - 1) // TILE + documents, shape.key_heads)
        return ((tokens + shape.tokens - 1) // shape.tokens + documents, shape.heads // shape.together)

    def launch(self, name: str, tensors: tuple[Tensor, ...], *statistics: Tensor, only_compile: bool = False) -> None:
        """Run a kernel on tensors of (tokens, heads, size), then statistics of (heads, tokens)."""
        shape, query, has_bias = self.shape, tensors[0], self.bias.numel() > 0
        documents, tokens, keys = self.borders.numel() - 1, query.shape[0], tensors[1].shape[0]
        strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
        borders = (self.key_borders, self.borders) if name == "keys" else (self.borders, self.key_borders)
        kernel, grid = kernels()[name], self._grid(name, tokens, keys)
        with torch.cuda.device_of(query):
            (partial(kernel.warmup, grid=grid) if only_compile else kernel[grid])(
                *tensors, *statistics, self.bias, *borders, self.seed, documents, tokens, self.scale, self.drop,
                self.bias.shape[1] if has_bias else 1, *strides,
                G=shape.together, SHARING=shape.sharing, D=shape.size, T=shape.tokens, N=TILE, CAUSAL=self.causal,
                WINDOW=self.window, DROP=self.drop > 0, ROOM=room_for(documents), BIAS=has_bias,
                CROSS=self.is_cross,
                WIDE=max(tokens, keys) * max(strides) >= 2**31, num_warps=WARPS,
                num_stages=STAGES[name][shape.size > 64],
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
    room = room_for(job.borders.numel() - 1)
    kind = (job.shape, dtype, job.causal, job.window, job.drop > 0, room, job.bias.numel() > 0, job.is_cross)
    is_known = kind in _SEEN
    _SEEN.add(kind)
    return not is_known


def prepare(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, *, causal: bool, window: int) -> None:
    """Compile the kernels for such rows in bfloat16, in threads: a proof in single precision comes before that."""
    with suppress(Exception):  # the actual launch raises the error
        bias = query.new_empty(0, dtype=torch.float32)
        job = Job(Shape.of(query, key), bias, borders, borders, borders[:1], causal, window, 1.0, 0.0)
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
    rows: dict[str, tuple[Tensor, ...]]
    rows = {"queries": (query, key, value, output, output, query), "keys": (query, key, value, output, key, value)}
    if job.bias.numel():
        rows["bias"] = (query, key, value, output)
    for name, tensors in rows.items():
        _UNDER_WAY.append(Thread(target=_quietly, args=(job, name, tensors, sums), daemon=True))
        _UNDER_WAY[-1].start()


def _await(threads: list[Thread]) -> None:
    while threads:
        threads.pop().join()


def _quietly(job: Job, name: str, tensors: tuple[Tensor, ...], sums: Tensor) -> None:
    with suppress(Exception):  # the actual launch raises the error
        statistics = [sums] * (3 if name == "bias" else 2)
        job.launch(name, tensors, *statistics, only_compile=True)
