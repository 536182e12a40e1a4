"""Kernels of other packages that replace layers of the model for a run, after a comparison: Liger."""

from __future__ import annotations

from typing import Any

from ..args.reading import read_dict
from ..notices import logger
from ..speed.liger import LigerKernels, check_liger_installed, prove_liger, why_without_liger
from .data.columns import innermost
from .part import TorchPart


class Kernels(TorchPart):
    """Applies `use_liger_kernel` at the first update of a run, and removes it after the last."""

    _found: LigerKernels | None = None
    is_pending: bool = False
    """Whether kernels wait for the batch on which they are compared."""

    def check_installed(self) -> None:
        """Raise if kernels are requested and their package is missing; called by the constructor."""
        if self.args.use_liger_kernel:
            check_liger_installed()

    def prepare(self) -> None:
        """Find the replacements for the model, when training begins."""
        if not self.args.use_liger_kernel:
            return
        model = innermost(self.model)
        reason = why_without_liger(model)
        if reason is not None:
            self._leave_out(reason)
            return
        self._found = LigerKernels(model, read_dict(self.args.liger_kernel_config) or {})
        self.is_pending = True

    def settle(self, batches: list[Any]) -> None:
        """Compare the kernels with the layers they replace, on a batch of the first update, and apply or drop them."""
        self.is_pending = False
        assert self._found is not None
        if self.strategy.is_sharded or self.strategy.world_size > self.strategy.data_world:
            self.notices.warn_once(
                "parameters are sharded, so Liger's kernels are used without a comparison of loss and gradients"
            )
            self._apply()
            return
        proof = prove_liger(self._found, self.internals.acceleration.training_setup(), batches)
        if self.strategy.any_rank(not proof.accepted):
            self._leave_out(proof.reason or "another rank found a difference")
            if self.is_alone:
                self.run.speed = self.internals.acceleration.start()
            return
        found = ", ".join(f"{name} within {value:.0e}" for name, value in proof.numbers.items())
        logger.info(f"speed: Liger's kernels are used: {found}")
        self._apply()

    def _apply(self) -> None:
        assert self._found is not None
        self._found.apply()
        self._adopt_attributes(self._found)

    def _adopt_attributes(self, found: LigerKernels) -> None:
        """Leave the attributes of the kernels out of checkpoints."""
        modules = self.internals.saving.modules
        if modules is not None:
            modules.adopt(found.attributes(modules.module))

    def _leave_out(self, reason: str) -> None:
        self._found = None
        self.notices.warn_once(f"use_liger_kernel=True has no effect: {reason}")

    @property
    def is_used(self) -> bool:
        """Whether kernels are applied, or may be."""
        return self._found is not None

    def finish(self) -> None:
        """Restore the layers of the model."""
        if self._found is not None:
            self._found.remove()
            self._adopt_attributes(self._found)
        self._found, self.is_pending = None, False
