"""Making a trainer of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..args.paths import working_folder
from ..core.events import TrainerCallback
from ..notices import Notices, logger
from .config import RESOLVED, Config
from .run_control import RunControl

if TYPE_CHECKING:
    from ..args.base import BaseArguments
    from ..pt.trainer import Trainer
    from ..tasks.declaration import Materials


class ConfigRecord(TrainerCallback):
    """Writes `resolved_config.json` when a run begins: the folder is the run's own from then on."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and args.should_save:
            folder = Path(working_folder(args.output_dir))
            try:
                self.config.write(folder)
            except OSError as error:
                logger.warning(f"{folder}: {RESOLVED} cannot be written ({error}); the run continues without it")


def build_trainer(config: Config) -> Trainer:
    """Load model and data, and create the trainer."""
    return trainer_of(config, config.task.build(config.request()))


def trainer_of(config: Config, materials: Materials) -> Trainer:
    """The trainer of a configuration whose model and data were loaded."""
    from ..pt.seq2seq import Seq2SeqTrainer
    from ..pt.trainer import Trainer
    from ..tasks.model.models import check_ids, check_lengths

    given = materials.train_dataset
    for samples in (*(given.values() if isinstance(given, dict) else [given]), materials.eval_dataset):
        check_ids(materials.model, samples)
        check_lengths(materials.model, samples, config.request())
    kind = Seq2SeqTrainer if config.task.generates else Trainer
    notices = Notices(strict=config.args.strict, quiet=not config.args.should_log)
    for note in materials.notes:
        notices.warn_once(note)
    control = RunControl()
    trainer = kind(
        model=materials.model,
        args=config.args,
        data_collator=materials.data_collator,
        train_dataset=given,
        eval_dataset=materials.eval_dataset,
        processing_class=materials.processing_class,
        compute_metrics=materials.compute_metrics,
        preprocess_logits_for_metrics=materials.preprocess_logits_for_metrics,
        callbacks=[ConfigRecord(config), control],
    )
    control.follow(trainer)
    return trainer
