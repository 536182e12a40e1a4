"""Notes of docs/compatibility.md: what is better and how, what is not available and why, and who uses which name."""

from __future__ import annotations

BETTER: dict[str, dict[str, str]] = {
    "argument": {
        "output_dir": "also a URL (`s3://...`); a second run in the same place is refused",
        "resume_from_checkpoint": 'bitwise, also in the middle of an epoch; `"auto"`: the newest one if there is any',
        "gradient_accumulation_steps": "the loss is divided by the targets of the whole step for every kind of loss",
        "weight_decay": "no norm decays, such as BatchNorm; in transformers LayerNorm and what is named a norm",
        "eval_strategy": "an evaluation does not change the random numbers of training",
        "save_total_limit": "nothing is removed before its successor is complete; a file named `pinned` keeps one",
        "load_best_model_at_end": "the best of this run, verified by hashes before it is loaded",
        "enable_jit_checkpoint": "SIGTERM saves the last finished step and exits with 75",
        "restore_callback_states_from_checkpoint": "a state that cannot be saved is reported before the first step",
        "push_to_hub": "one commit for each push, no pickles, errors are raised at the end",
        "hub_strategy": "the end of a run waits for pushes; `last-checkpoint` resumes by `hf://owner/name/last-checkpoint`",
        "train_sampling_strategy": "the order depends on seed and epoch only; `batch_rebalance` repeats no sample",
    },
    "method": {
        "train": "exact resume; errors of your code end with a line that shows its inputs",
        "evaluate": "`eval_loss` is the mean over all targets and does not depend on the batch size",
        "compute_loss": "may return the mean, or `(sum, count)`, and values by name that are logged",
        "save_model": "also to a URL",
        "create_model_card": "your text is kept; results also as the Hub's evaluation files",
        "hyperparameter_search": "each trial has its own process; a killed search continues where it was",
    },
    "event": {},
    "callback": {
        "EarlyStoppingCallback": "its state is restored by default, so a resumed run stops where it would have",
    },
    "optimizer": {},
    "schedule": {},
}
"""Names by kind that do more than in transformers. Everything here is shown by a test."""

ABSENT: dict[str, dict[str, str]] = {
    "argument": {},
    "method": {},
    "event": {},
    "callback": {},
    "optimizer": {},
    "schedule": {},
}
"""Names that exist and are not served, and why."""

NAMES: list[tuple[str, str, str]] = [
    ("compute_loss", "TRL, sentence-transformers, GLiNER", "override point"),
    ("training_step", "TRL, GLiNER", "override point"),
    ("prediction_step", "TRL", "override point"),
    ("log", "TRL, sentence-transformers", "override point"),
    ("evaluate", "TRL, sentence-transformers", "override point"),
    ("evaluation_loop", "TRL, sentence-transformers", "override point"),
    ("call_model_init", "sentence-transformers", "override point"),
    ("create_optimizer", "GLiNER, adapters", "override point"),
    ("get_optimizer_cls_and_kwargs", "sentence-transformers", "override point"),
    ("get_train_dataloader", "TRL, sentence-transformers", "override point"),
    ("get_eval_dataloader", "TRL, sentence-transformers", "override point"),
    ("get_test_dataloader", "sentence-transformers", "override point"),
    ("save_model", "GLiNER", "override point"),
    ("_save", "sentence-transformers, GLiNER, adapters", "override point"),
    ("_save_checkpoint", "TRL", "override point"),
    ("_load_best_model", "sentence-transformers, adapters", "override point"),
    ("_load_from_checkpoint", "sentence-transformers, adapters", "override point"),
    ("_load_optimizer_and_scheduler", "TRL (GRPO)", "override point; may call `super()`"),
    ("_prepare_inputs", "TRL", "override point"),
    ("_get_train_sampler", "TRL", "override point"),
    ("_get_eval_sampler", "TRL", "override point"),
    ("_get_dataloader", "TRL", "called with `sampler_fn`, `is_training` and `dataloader_key`, which have effects"),
    ("_get_output_dir", "TRL", "returns the output folder"),
    ("_set_signature_columns_if_needed", "TRL", "override point; columns are removed before the collator"),
    ("_signature_columns", "TRL", "names columns of the dataset; what a collator makes is passed on"),
    ("_train_batch_size", "TRL, GLiNER", "samples per micro-batch"),
    ("_globalstep_last_logged", "TRL", "the step of the last log point"),
    ("push_in_progress", "sentence-transformers", "the queue of pushes: `is_done`, `wait_until_done`, `cancel`"),
    (
        "accelerator",
        "TRL, sentence-transformers, setfit",
        "its methods; one that is not available raises",
    ),
    ("callback_handler", "TRL, sentence-transformers", "`on_*` methods and `callback_list`"),
    ("_inner_training_loop", "TRL (experimental)", "an override is refused by name"),
    ("_maybe_log_save_evaluate", "TRL (online DPO)", "override point; may call `super()`"),
    ("_eval_dataloaders", "TRL, sentence-transformers, GLiNER", "evaluation loaders with persistent workers, by key"),
    ("_total_loss_scalar", "TRL (online DPO)", "the sum of the losses of all updates"),
    ("_issue_warnings_after_load", "GLiNER", "reports weights that were not found, or found too many"),
    ("_load_callback_state", "scripts that evaluate checkpoints", "override point; restores callbacks from `state`"),
    ("_push_from_checkpoint", "sentence-transformers", "override point; gets complete checkpoints only"),
    ("axolotl, Unsloth", "they rewrite the source of transformers' Trainer", "`install()` refuses them by name"),
]
"""Names that libraries override or read, who does, and how each is served."""
