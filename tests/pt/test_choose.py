"""Which strategy carries out which combination of arguments: a test per row, and the reason for every refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from loopwright import ArgumentsError, TrainingArguments
from loopwright.pt.distributed.process_group import backend_for
from loopwright.pt.distributed.shared_devices import backend_of_shared
from loopwright.pt.strategies import choose
from loopwright.pt.strategies.choose import LIMITS, NOWHERE, TABLE, Unsupported, chosen_row, requested_parallelism

ZERO = {"zero_optimization": {"stage": 2}}
ROWS: dict[frozenset[str], tuple[int, dict[str, Any]]] = {
    frozenset(): (1, {}),
    frozenset({"processes"}): (2, {}),
    frozenset({"processes", "replicas"}): (2, {"parallelism_config": {"dp_replicate_size": 2}}),
    frozenset({"fsdp"}): (1, {"fsdp": True}),
    frozenset({"processes", "fsdp"}): (2, {"fsdp": "full_shard auto_wrap"}),
    frozenset({"processes", "fsdp", "replicas"}): (
        4,
        {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}},
    ),
    frozenset({"processes", "tensor"}): (2, {"parallelism_config": {"tp_size": 2}}),
    frozenset({"processes", "tensor", "fsdp"}): (4, {"fsdp": True, "parallelism_config": {"tp_size": 2}}),
    frozenset({"processes", "tensor", "replicas"}): (4, {"parallelism_config": {"tp_size": 2, "dp_replicate_size": 2}}),
    frozenset({"processes", "tensor", "fsdp", "replicas"}): (
        8,
        {"fsdp": True, "parallelism_config": {"tp_size": 2, "dp_replicate_size": 2, "dp_shard_size": 2}},
    ),
    frozenset({"deepspeed"}): (1, {"deepspeed": ZERO}),
    frozenset({"processes", "deepspeed"}): (2, {"deepspeed": ZERO}),
    frozenset({"processes", "deepspeed", "fsdp"}): (2, {"deepspeed": ZERO, "fsdp": True}),
    frozenset({"deepspeed", "fsdp"}): (1, {"deepspeed": ZERO, "fsdp": True}),
    frozenset({"processes", "deepspeed", "tensor"}): (2, {"deepspeed": ZERO, "parallelism_config": {"tp_size": 2}}),
}
BUILDERS = {"_single": 1, "_ddp": 2, "_fsdp": 3, "_tensor": 2, "_deepspeed": 2}


def arguments(monkeypatch: pytest.MonkeyPatch, world: int, **given: Any) -> TrainingArguments:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    return TrainingArguments("run", use_cpu=True, **given)


def test_every_row_is_tried() -> None:
    assert set(ROWS) == set(TABLE)
    built = [row.__name__ for row in TABLE.values() if not isinstance(row, Unsupported)]
    assert {name: built.count(name) for name in BUILDERS} == BUILDERS


@pytest.mark.parametrize("asked", ROWS, ids=lambda asked: "-".join(sorted(asked)) or "nothing")
def test_a_row_is_found_by_its_arguments(monkeypatch: pytest.MonkeyPatch, asked: frozenset[str]) -> None:
    args = arguments(monkeypatch, ROWS[asked][0], **ROWS[asked][1])
    assert requested_parallelism(args) == asked
    row = TABLE[asked]
    if isinstance(row, Unsupported):
        with pytest.raises(ArgumentsError) as caught:
            chosen_row(args)
        assert caught.value.problems == [row.reason]
    else:
        assert chosen_row(args) is row


SIZES = {"context": "cp_size", "sequence": "sp_size", "pipeline": "pp_size", "expert": "ep_size"}


@pytest.mark.parametrize("name", NOWHERE)
@pytest.mark.parametrize("fsdp", [None, True])
def test_what_is_possible_nowhere_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, fsdp: Any
) -> None:
    args = arguments(monkeypatch, 4, parallelism_config={SIZES[name]: 2}, fsdp=fsdp)
    with pytest.raises(ArgumentsError) as caught:
        chosen_row(args)
    assert caught.value.problems == [NOWHERE[name]]


WRONG: list[tuple[int, dict[str, Any], str]] = [
    (3, {"parallelism_config": {"tp_size": 2}}, "needs 2 ranks or a multiple, but there are 3"),
    (4, {"parallelism_config": {"tp_size": 2}}, r"set fsdp=True \(or dp_shard_size=2\)"),
    (4, {"parallelism_config": {"dp_shard_size": 2}}, "is for 2 ranks, but there are 4"),
    (1, {"parallelism_config": {"tp_size": 2}}, "not supported|needs 2 ranks"),
]


@pytest.mark.parametrize(("world", "given", "words"), WRONG)
def test_sizes_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, world: int, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentsError, match=words):
        chosen_row(arguments(monkeypatch, world, **given))


BEYOND: list[tuple[int, dict[str, Any]]] = [
    (2, {"auto_find_batch_size": True}),
    (2, {"fsdp": True, "fp16": True}),
    (2, {"fsdp": True, "bf16_full_eval": True}),
    (2, {"fsdp": True, "optim": "adafactor"}),
    (2, {"fsdp": True, "checkpoint_format": "transformers"}),
    (2, {"deepspeed": ZERO, "on_nonfinite": "skip"}),
    (2, {"deepspeed": {"zero_optimization": {"stage": 0}}}),
    (2, {"deepspeed": ZERO, "optim": "adafactor"}),
]


@pytest.mark.parametrize(("limit", "case"), list(zip(LIMITS, BEYOND, strict=True)), ids=lambda each: str(each[-1])[:40])
def test_what_a_strategy_cannot_honour_is_refused(monkeypatch: pytest.MonkeyPatch, limit: Any, case: Any) -> None:
    with pytest.raises(ArgumentsError) as caught:
        chosen_row(arguments(monkeypatch, case[0], **case[1]))
    assert limit[2] in caught.value.problems


def test_everything_wrong_is_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentsError) as caught:
        chosen_row(
            arguments(monkeypatch, 2, fsdp=True, fp16=True, optim="adafactor", parallelism_config={"cp_size": 2})
        )
    assert len(caught.value.problems) == 3


def test_nothing_is_opened_or_imported_for_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "open_processes", lambda *a, **k: pytest.fail("opened a group"))
    with pytest.raises(ArgumentsError):
        choose.choose_strategy(arguments(monkeypatch, 2, auto_find_batch_size=True), torch.device("cpu"), Any)


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [("cpu", None, "gloo"), ("cpu", "gloo", "gloo"), ("cuda", None, "cpu:gloo,cuda:nccl"),
     ("xpu", None, "cpu:gloo,xpu:xccl"),
     ("cuda", "gloo", "cpu:gloo,cuda:gloo")],
)  # fmt: skip
def test_devices_talk_with_their_own_library(device: str, asked: str | None, expected: str) -> None:
    assert backend_for(torch.device(device), asked) == expected


def test_a_library_of_accelerators_is_refused_on_the_cpu() -> None:
    with pytest.raises(ArgumentsError, match="ddp_backend='nccl'"):
        backend_for(torch.device("cpu"), "nccl")


@pytest.mark.parametrize(
    ("identities", "asked", "expected"),
    [(["a", "a"], None, "gloo"), (["a", "b"], None, None), (["", ""], None, None), (["a", "a"], "mpi", "mpi"),
     (["a", "b"], "nccl", "nccl"), (["a", "b", "b"], None, "gloo")],
)  # fmt: skip
def test_ranks_on_one_device_communicate_by_gloo(
    identities: list[str], asked: str | None, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    store, device = HashStore(), torch.device("cuda", 0)
    for rank, identity in enumerate(identities):
        store.set(f"device/{rank}", identity)
    found = {backend_of_shared(device, asked, store, k, len(identities), each) for k, each in enumerate(identities)}
    assert found == {expected}
    assert ("communicate by gloo through host memory" in caplog.text) == (expected == "gloo")


def test_nccl_is_refused_for_ranks_on_one_device() -> None:
    store, device = HashStore(), torch.device("cuda", 0)
    store.set("device/1", "a")
    with pytest.raises(ArgumentsError, match="ddp_backend='nccl' needs a device for each rank, but ranks 0, 1 share"):
        backend_of_shared(device, "nccl", store, 0, 2, "a")
