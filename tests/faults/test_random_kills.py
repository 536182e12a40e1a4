"""Kills and signals at random moments, of one process and of several; random_kills.py also runs by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .random_kills import VARIANTS, Campaign, Case, Kill, Runners, available, outcome

pytestmark = pytest.mark.xdist_group("faults-random-kills")

FORKED = [name for name, each in VARIANTS.items() if each.processes == 1 and each.module == "tests.faults.runs"]


def campaign(folder: Path, names: list[str], kills: int, seed: int = 0) -> dict[str, Any]:
    names = [name for name in names if name in available()]
    if not names:
        pytest.skip("TensorFlow is not installed")
    done = Campaign(seed, folder / "kills.jsonl", names).run(kills, seconds=3600)
    print(done)
    return done


def test_a_handful_of_kills_of_one_process(tmp_path: Path) -> None:
    done = campaign(tmp_path, FORKED, kills=8)
    assert done["kills"] >= 8 and not done["wrong"], done["wrong"]


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    campaign(tmp_path, FORKED[:1], kills=1)
    before = (tmp_path / "kills.jsonl").read_text()
    assert campaign(tmp_path, FORKED[:1], kills=1)["cases"] == 1, "there were enough"
    more = campaign(tmp_path, FORKED[:1], kills=4)
    assert more["kills"] >= 4 and not more["wrong"], more["wrong"]
    assert (tmp_path / "kills.jsonl").read_text().startswith(before)


@pytest.mark.grid
@pytest.mark.parametrize("targets", [["all"], ["all", "one rank"]], ids=len)
def test_ranks_keep_their_random_states_in_the_format_of_transformers(targets: list[str], tmp_path: Path) -> None:
    kills = [Kill("SIGTERM", target, 0.3 / (1 + number)) for number, target in enumerate(targets)]
    with Runners(tmp_path) as runners:
        assert outcome(runners, Case(0, "two processes, transformers", kills), lambda kill: None) == []


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_random_kills_of_every_variant(name: str, tmp_path: Path) -> None:
    done = campaign(tmp_path, [name], kills=20 if VARIANTS[name].processes == 1 else 6, seed=1)
    assert not done["wrong"], done["wrong"]
