"""HubPart: what a trainer pushes to the Hub, and when."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..args.names import HubStrategy, SaveStrategy
from ..args.paths import is_url, plain_path
from ..core.checkpoint.folder import folder_name, step_in_name
from ..core.checkpoint.manifest import Manifest, read_manifest
from ..errors import ArgumentsError, HubError, LoopwrightError
from ..notices import logger
from .contents import (
    PREFIX,
    files_in,
    leftovers,
    linked_copy,
    model_files,
    without_pickles,
)
from .model import ModelPushing
from .pushes import Push
from .record import PushRecord
from .repository import Change, Repository, hub_package
from .resuming import FOLDER, LAST, PushedCheckpoint

WEIGHTS = (".safetensors", ".safetensors.index.json", ".keras", ".h5")


@dataclass(frozen=True)
class Draft:
    """What a push says about the state at the time of the save."""

    message: str
    documents: dict[str, bytes]
    """The card and the evaluation results, by path in the repository."""


class HubPart(ModelPushing):
    """Pushes of a trainer: its checkpoints during a run, and its model."""

    def __init__(self, internals: Any) -> None:
        super().__init__(internals)
        self._drafts: dict[int, Draft] = {}
        self._problem: LoopwrightError | None = None
        self._silenced = False
        self._is_saving = False

    def create_repository(self) -> None:
        """Create the repository; with several ranks, an error is raised by all of them when training begins."""
        if not self.args.push_to_hub:
            return
        try:
            self.trainer.init_hf_repo()
        except LoopwrightError as error:
            if self.strategy.world_size == 1:
                raise
            self._problem = error

    # ---- a run ------------------------------------------------------------------------------------------------------

    @property
    def _kind(self) -> HubStrategy:
        return HubStrategy(self.args.hub_strategy)

    @property
    def _pushes_saves(self) -> bool:
        return bool(self.args.push_to_hub) and self._kind != HubStrategy.END

    @property
    def _may_be_superseded(self) -> bool:
        return self._kind != HubStrategy.ALL_CHECKPOINTS and not self.args.hub_always_push

    def begin(self) -> None:
        if not self.args.push_to_hub:
            return
        self._drafts, self._is_saving = {}, False
        if self._problem is None and self.trainer.hub_model_id is None:
            self.create_repository()
        problem = self.strategy.broadcast(None if self._problem is None else str(self._problem))
        self._problem = None
        if problem is not None:
            raise HubError(problem)
        if self._kind == HubStrategy.EVERY_SAVE and self.strategy.is_sharded:
            raise ArgumentsError(
                'hub_strategy="every_save" pushes the whole model of each checkpoint, but the ranks of this run save '
                'shards of it; use "checkpoint", "all_checkpoints", or "end"'
            )
        if not self.trainer.is_world_process_zero():
            return
        for folder in leftovers(self._working):
            shutil.rmtree(folder, ignore_errors=True)
        utils = hub_package().utils
        if not self._silenced and not utils.are_progress_bars_disabled():
            utils.disable_progress_bars()
            self._silenced = True
        if self._pushes_saves:
            self.run.checkpoints.on_published = self._published
            self._push_missing()

    def before_save(self) -> None:
        self._is_saving = True
        if self._pushes_saves and self.trainer.is_world_process_zero():
            # The save before this one may still be in progress, and its push needs its draft.
            self._drafts = dict([*self._drafts.items(), (self.state.global_step, self._draft())][-2:])

    def after_save(self) -> None:
        self._is_saving = False
        if not self._pushes_saves:
            return
        checkpoints = self.run.checkpoints
        if checkpoints.is_saving:  # pushed when it is published
            self.callback_handler.fire("on_push_begin")
        elif not self.strategy.any_rank(checkpoints.was_skipped):
            self.callback_handler.fire("on_push_begin")
            self.trainer._push_from_checkpoint(str(checkpoints.storage.place(folder_name(self.state.global_step))))

    def push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a complete checkpoint while training continues, as `hub_strategy` sets."""
        if self.trainer.is_world_process_zero() and self._kind != HubStrategy.END:
            if self.trainer.hub_model_id is None:
                self.trainer.init_hf_repo()
            self._push_checkpoint(checkpoint_folder)

    def finish(self) -> None:
        if not self.args.push_to_hub:
            return
        if not self.queue.is_done():
            logger.info(f"waiting until everything is pushed to {self.trainer.hub_model_id}")
        self._wait(self.queue.wait_until_done)
        if self._is_interrupted():
            return
        self.queue.try_failed_again()
        self._wait(self.queue.wait_until_done)
        failures = [str(error) for _, error in self.queue.take_failures()]
        text = self.strategy.broadcast("; ".join(failures) or None)
        if text is not None:
            raise HubError(
                f"training has ended and all files are saved in {self.args.output_dir}, but {text}. "
                'Call trainer.push_to_hub(), or train(resume_from_checkpoint="auto") to push the missing checkpoints'
            )

    def close(self) -> None:
        left = self.queue.stop()
        if left:
            logger.warning(
                f"not pushed to {self.trainer.hub_model_id}: {', '.join(left)}. The run that resumes this one pushes "
                "the checkpoints that its folder still has"
            )
        if self.trainer.is_world_process_zero():
            shutil.rmtree(self._working / FOLDER, ignore_errors=True)
        if self._silenced:
            hub_package().utils.enable_progress_bars()
            self._silenced = False

    def wait(self) -> None:
        self.queue.wait_until_done()

    def local_checkpoint(self, request: str) -> str:
        found = PushedCheckpoint.parsed(request, self.args.hub_token)
        name = self.trainer.hub_model_id or self.args.hub_model_id or ""
        if request == LAST and "/" in name and not os.path.isdir(LAST):
            found = PushedCheckpoint(Repository(name, self.args.hub_revision, self.args.hub_token), LAST)
        return request if found is None else str(found.downloaded(self._working))

    # ---- pushes of checkpoints --------------------------------------------------------------------------------------

    def _published(self, step: int) -> None:
        """Push a checkpoint that was published, unless callbacks follow that may change it: then `after_save` does."""
        follows = self._is_saving and not self.run.checkpoints.is_saving
        if not follows and self.trainer.is_world_process_zero():
            self._push_checkpoint(str(self.run.checkpoints.storage.place(folder_name(step))))

    def _push_missing(self) -> None:
        """Push the checkpoints of this run that an earlier process has saved and not pushed."""
        checkpoints = self.run.checkpoints
        saved = checkpoints.complete()
        steps = sorted(saved) if self._kind == HubStrategy.ALL_CHECKPOINTS else sorted(saved)[-1:]
        record = self._record()
        for step in steps:
            manifest = checkpoints.storage.manifest(checkpoints.storage.resolve(folder_name(step)) or "")
            if manifest is not None and manifest.check is not None and not record.holds(manifest.check):
                logger.info(f"{folder_name(step)} is not on the Hub yet; it is pushed now")
                self._push_checkpoint(str(saved[step]))

    def _push_checkpoint(self, place: str) -> None:
        title = Path(place).name
        push = Push(title, self._repository(), Change({}), "", may_be_superseded=self._may_be_superseded)
        try:
            folder = Path(self.run.checkpoints.local(place)) if is_url(place) else Path(plain_path(place))
            manifest = read_manifest(folder)
            step = step_in_name(folder) if manifest is None else manifest.step
            draft = None if step is None else self._drafts.get(step)
            push = self._checkpoint_push(folder, manifest, draft or self._draft())
        except (OSError, LoopwrightError) as error:
            self.queue.add_failure(push, HubError(f"{title} cannot be read ({error})"))
            return
        self.trainer.push_in_progress = self.queue
        self.queue.put(push)

    def _checkpoint_push(self, folder: Path, manifest: Manifest | None, draft: Draft) -> Push:
        """The push of a checkpoint: its model at the root, and the whole of it in a folder if the strategy has one."""
        self._count += 1
        copy = linked_copy(folder, self._working / f"{PREFIX}{folder.name}-{self._count}")
        files, pickles = without_pickles(files_in(copy))
        root = {name: path for name, path in model_files(copy).items() if name in files}
        if self.strategy.is_sharded:
            root = {name: path for name, path in root.items() if not name.endswith(WEIGHTS)}
        change = Change({**root, **draft.documents})
        whole = {HubStrategy.CHECKPOINT: LAST, HubStrategy.ALL_CHECKPOINTS: folder.name}.get(self._kind)
        if whole is not None:
            change.files.update({f"{whole}/{name}": path for name, path in files.items()})
            change.folders.append(whole)
        self._tell_left_out(pickles, is_whole=whole is not None)
        record, check = self._record(), None if manifest is None else manifest.check
        return Push(
            folder.name,
            self._repository(),
            change,
            draft.message,
            may_be_superseded=self._may_be_superseded,
            done=lambda: None if check is None else record.add(check),
            folder=copy,
        )

    def _record(self) -> PushRecord:
        target = self._repository()
        key = f"{target.name}@{target.revision or 'main'}, {self._kind.value}"
        return PushRecord(self.run.checkpoints.storage, key)

    def _draft(self) -> Draft:
        state, by_step = self.state, self.args.save_strategy == SaveStrategy.STEPS
        position = f"step {state.global_step}" if by_step else f"epoch {int(state.epoch or 0)}"
        try:
            documents = self._documents()
        except Exception as error:  # it reads objects of the user; a save does not fail because of a card
            logger.warning(
                f"this push has no model card, because it could not be made ({type(error).__name__}: {error})"
            )
            documents = {}
        return Draft(f"Training in progress, {position}", documents)
