"""A world of one process whose runtime notes collectives: `XLA_ALWAYS_ALLREDUCE=1 python loopback.py FOLDER`.

What several devices would do, as far as one can: the sum of gradients is in the graph of the step, through the real
backend `xla`, and a run with it gives what a run without it gives.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch_xla

from loopwright.pt.distributed.process_group import open_processes
from loopwright.xla import runtime
from loopwright.xla.processes import XlaProcesses
from loopwright.xla.strategy import XlaDevice
from tests.xla.runs import apart, losses, trainer

SUM = "cross_replica_sum"


def of(cls: Any, args: Any, device: torch.device, precision: Any) -> XlaProcesses:
    runtime.register_backend()
    return XlaProcesses(
        device, precision, open_processes(device, backend="xla", timeout=args.ddp_timeout_delta), spans=True
    )


def main(folder: str) -> None:
    plain = trainer("own", f"{folder}/plain", eval_strategy="epoch")
    plain.train()
    XlaDevice.of = classmethod(of)  # type: ignore[assignment]
    run = trainer("own", f"{folder}/summed", eval_strategy="epoch")
    noted: list[str] = []
    step = run._loopwright.strategy.optimizer_step

    def stepping(veto: Any = None) -> bool:
        noted.append(torch_xla._XLAC._get_xla_tensors_text([p.grad for p in run.model.parameters()]))
        return bool(step(veto))

    run._loopwright.strategy.optimizer_step = stepping
    before = runtime.graphs()
    run.train()
    graphs = runtime.graphs() - before
    assert type(run._loopwright.strategy) is XlaProcesses and len(noted) == 6
    assert all(SUM in text for text in noted), noted[0]
    assert losses(run) == losses(plain) and apart(run.model, plain.model) == 0
    assert graphs <= 2, graphs
    bad = torch.tensor(float("nan"), device=run._loopwright.device)
    assert (
        bool(run._loopwright.strategy.nonfinite(bad, None, sticky=False))
        and float(run._loopwright.strategy.mean_count(5)) == 5.0
    )
    print("GOOD", graphs)


if __name__ == "__main__":
    main(sys.argv[1])
