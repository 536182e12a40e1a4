"""TrainingArguments and Seq2SeqTrainingArguments, and the questions asked of a device."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from loopwright.pt import devices
from loopwright.pt.arguments import Seq2SeqTrainingArguments, TrainingArguments

CPU = torch.device("cpu")


class Accelerator:
    """Stands in for torch.accelerator."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count

    def is_available(self) -> bool:
        return True

    def current_accelerator(self) -> torch.device:
        return torch.device(self.kind)

    def device_count(self) -> int:
        return self.count


def test_on_the_cpu_there_is_no_gpu():
    args = TrainingArguments("out", use_cpu=True)
    assert (args.device, args.n_gpu, args.place_model_on_device) == (CPU, 0, True)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_the_accelerator_of_the_machine_is_taken(kind, monkeypatch):
    monkeypatch.setattr(torch, "accelerator", Accelerator(kind, 2))
    args = TrainingArguments("out")
    assert args.device == torch.device(kind, 0) and args.n_gpu == 1
    assert TrainingArguments("out", use_cpu=True).device == CPU


def test_each_local_process_has_its_device(monkeypatch):
    monkeypatch.setattr(torch, "accelerator", Accelerator("cuda", 4))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert TrainingArguments("out").device == torch.device("cuda", 3)


def test_asking_for_the_device_changes_nothing():
    args = TrainingArguments("out")
    before = dict(vars(args))
    assert args.device is not None and vars(args) == before
    assert pickle.loads(pickle.dumps(args)) == args


def test_a_subclass_may_keep_the_model_where_it_is():
    class Stay(TrainingArguments):
        @property
        def place_model_on_device(self) -> bool:
            return False

    assert Stay("out").place_model_on_device is False


def test_a_generation_config_is_written_out():
    transformers = pytest.importorskip("transformers")
    config = transformers.GenerationConfig(max_length=7)
    args = Seq2SeqTrainingArguments("out", predict_with_generate=True, generation_config=config)
    assert args.to_dict()["generation_config"]["max_length"] == 7
    assert args.to_json_string() and dataclasses.replace(args).generation_config is config


def test_the_cpu_can_what_it_can():
    assert devices.supports_bf16(CPU)
    assert not devices.can_pin_memory(CPU) and devices.memory_figures(CPU) == {}
    devices.synchronize(CPU)
    devices.empty_cache(CPU)
    devices.reset_peak_memory(CPU)


def test_random_state_can_be_put_back():
    state = devices.rng_state(CPU)
    first = torch.rand(3)
    devices.set_rng_state(CPU, state)
    assert torch.equal(torch.rand(3), first)


def test_probing_draws_no_random_numbers():
    for probe in (devices.supports_bf16, devices.can_pin_memory):
        probe.cache_clear()
    state = devices.rng_state(CPU)
    assert devices.supports_bf16(CPU)
    assert torch.equal(devices.rng_state(CPU), state)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_an_accelerator_answers_all_questions():
    device = devices.choose_device(False, 0)
    torch.ones(1000, device=device)
    assert devices.memory_figures(device)["allocated"] >= 0
    state = devices.rng_state(device)
    first = torch.rand(3, device=device)
    devices.set_rng_state(device, state)
    assert torch.equal(torch.rand(3, device=device), first)
    devices.synchronize(device)
    devices.empty_cache(device)
