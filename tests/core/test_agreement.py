"""Comparing ranks: what is exchanged, what the sentences are, and what the description of a value depends on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import loopwright
from loopwright.args.base import BaseArguments
from loopwright.args.field import specs
from loopwright.core.distributed.agreement import Description, differences
from loopwright.core.distributed.description import described, described_arguments, described_code, versions


class Ranks:
    """Threads that exchange numbers as ranks do."""

    def __init__(self, world: int) -> None:
        self.world, self.exchanges = world, []
        self.rows: list[list[float]] = [[] for _ in range(world)]
        self.barrier = threading.Barrier(world, timeout=120)

    def gather(self, rank: int, numbers: list[float]) -> list[list[float]]:
        self.rows[rank] = numbers
        self.barrier.wait()
        found = [list(row) for row in self.rows]
        assert len({len(row) for row in found}) == 1
        if rank == 0:
            self.exchanges.append(len(numbers))
        self.barrier.wait()
        return found

    def compare(self, descriptions: list[Description]) -> list[tuple[list[str], list[str]]]:
        results: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            results[rank] = differences(descriptions[rank], partial(self.gather, rank))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return results


def test_equal_ranks_exchange_a_few_numbers_once() -> None:
    ranks = Ranks(3)
    same = {f"name {index}": "x" * 100 for index in range(1000)}
    assert ranks.compare([Description(dict(same)) for _ in range(3)]) == [([], [])] * 3
    assert len(ranks.exchanges) == 1 and ranks.exchanges[0] < 10


def test_every_rank_has_the_same_sentences() -> None:
    rows = [{"a": "1", "b": "2"}, {"a": "1", "b": "3é", "c": "5"}, {"a": "1", "b": "2"}]
    found = Ranks(3).compare([Description(row, {"place": str(rank)}) for rank, row in enumerate(rows)])
    assert found[0] == found[1] == found[2]
    assert found[0] == (
        ["b is 2 on ranks 0, 2 and 3é on rank 1", "c is missing on ranks 0, 2 and 5 on rank 1"],
        ["place is 0 on rank 0, 1 on rank 1 and 2 on rank 2"],
    )


def test_long_values_and_secrets() -> None:
    token = "hf_" + "a1B2" * 9
    found = Ranks(2).compare([Description({"text": "y" * 500}), Description({"text": "y" * 500 + token})])
    assert all(len(sentence) < 500 and token not in sentence for each in found for sentence in each[0])
    shown = Ranks(2).compare([Description({"text": ""}), Description({"text": f"'{token}'"})])[0][0][0]
    assert token not in shown


@dataclass
class Collator:
    share: float = 0.1


def scaled(factor: float) -> Any:
    return lambda value: value * factor if value in {"some", "words", "in", "a", "set"} else None


DIFFERENT = [1, 1.0, True, "1", None, [1], (2,), {"a": 1}, {"b": 1}, Collator(), Collator(0.2), partial(max, 1),
             partial(max, 2), max, min, scaled(1.0), scaled(2.0), lambda: 1, lambda: 2, int, float]  # fmt: skip


def test_different_values_have_different_descriptions() -> None:
    texts = [described(each) for each in DIFFERENT]
    assert len(set(texts)) == len(texts)
    assert described_code(scaled(1.0)) == described_code(scaled(2.0)) != described_code(lambda: 1)


def test_a_description_depends_on_no_hash_seed_and_no_address() -> None:
    code = f"import runpy; g = runpy.run_path({__file__!r}); print(list(map(g['described'], g['DIFFERENT'])))"
    source = str(Path(loopwright.__file__).parents[1])
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(texts) == 1 and "0x" not in texts.pop()


def test_every_argument_declares_whether_ranks_agree() -> None:
    same, usual = described_arguments(BaseArguments("out", hub_token="hf_secret", local_rank=3))
    free = {name for name, spec in specs(BaseArguments).items() if spec.ranks == "any"}
    old = {name for name, spec in specs(BaseArguments).items() if spec.row is not None}
    assert {"local_rank", "log_level", "hub_token"} <= free and set(usual) == {"output_dir"}
    assert {"learning_rate", "seed", "fsdp", "save_steps"} <= set(same)
    assert {*same, *usual} | free | old >= set(specs(BaseArguments)) and not free & {*same, *usual}


def test_a_file_of_options_is_compared_by_its_contents(tmp_path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text('{"min_lr": 0.1}')
    other.write_text('{"min_lr": 0.1}')
    given = [BaseArguments("out", lr_scheduler_kwargs=str(path)) for path in (one, other)]
    texts = [described_arguments(each)[0]["lr_scheduler_kwargs"] for each in given]
    assert texts[0] == texts[1] == "{'min_lr': 0.1}"


@pytest.mark.parametrize("package", ["numpy", "no-such-package"])
def test_versions(package: str) -> None:
    found = versions([package])
    assert found["python version"] == "{}.{}".format(*sys.version_info)
    assert (found[f"{package} version"] == "not installed") == (package == "no-such-package")
