"""Pushing the model: its repository, its card, and the ranks of a run, of which only rank 0 contacts the Hub."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..args.paths import is_url, working_folder
from ..core.part import PushPart
from ..core.user_code.overrides import adapt, is_overridden
from ..errors import HubError, LoopwrightError
from ..notices import logger
from .card import card
from .contents import CARD, PREFIX, output_files, without_pickles
from .facts import CardOptions, base_model, card_facts, dataset_tags, dataset_tasks
from .failures import explained
from .pushes import Push, PushQueue
from .repository import Change, Repository
from .results import FILE as RESULTS_FILE, Results, results_file

SLICE = 5.0
"""Seconds that ranks wait for pushes before they exchange whether all are done."""


class ModelPushing(PushPart):
    """Pushes the model, and writes its card."""

    trainer: Any

    def __init__(self, internals: Any) -> None:
        super().__init__(internals)
        self.queue = PushQueue()
        self._options = CardOptions()
        self._license: str | None = None
        self._left_out: list[str] = []
        self._count = 0

    # ---- the repository ---------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None) -> None:
        if not self.trainer.is_world_process_zero():
            return
        args = self.args
        name = args.hub_model_id or self._working.absolute().name
        asked = Repository(name, args.hub_revision, token or args.hub_token)
        created = self._on_the_hub(
            f"{name} could not be created", asked, lambda: asked.created(private=args.hub_private_repo)
        )
        self.trainer.hub_model_id, self.trainer.push_in_progress = created.name, None
        base = base_model(self.model)
        if base is not None and self._license is None:
            with suppress(Exception):  # a card without a license is not an error
                self._license = Repository(base, token=asked.token).license()

    def _on_the_hub(self, what: str, repository: Repository, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except LoopwrightError:
            raise
        except Exception as error:  # huggingface_hub passes on errors of three packages
            raise HubError(f"{what} on the Hub: {explained(error, repository.token)}") from error

    def _repository(self, token: str | None = None, revision: str | None = None) -> Repository:
        return Repository(self.trainer.hub_model_id, revision or self.args.hub_revision, token or self.args.hub_token)

    # ---- the model and its card -------------------------------------------------------------------------------------

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        *,
        is_saved: bool = False,
        **options: Any,
    ) -> Any:
        """Push the model, its processor, card, results and logs in one commit; returns it, or a Future of it."""
        self.callback_handler.fire("on_push_begin")
        self._together(lambda: self._begin_model_push(token, revision))
        self._wait(self.queue.wait_until_done)  # a push in progress may read the files that are written next
        if not is_saved and not is_url(self.args.output_dir):
            adapt(self.trainer.save_model, "_internal_call")(_internal_call=True)
        folder = self._model_folder()
        future = self._together(lambda: self._put_model(folder, commit_message, token, revision, options))
        if not blocking:
            return future
        self._wait(lambda seconds: future is None or _has_ended(future, seconds))
        return self._together(lambda: None if future is None else self._result(future))

    def push_saved(self, *, is_in_place: bool) -> None:
        """Push after a call of `save_model`; a model that is in the output folder is not saved once more."""
        if is_overridden(self.trainer, "push_to_hub") or not is_in_place:
            self.trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        else:
            self.push_to_hub("Model save", revision=self.args.hub_revision, is_saved=True)

    def _begin_model_push(self, token: str | None, revision: str | None) -> None:
        if self.trainer.hub_model_id is None:
            self.trainer.init_hf_repo(token=token)
        if revision is not None and revision != self.args.hub_revision:
            target = self._repository(token, revision)
            self._on_the_hub(
                f"the branch {revision} could not be created", target, lambda: target.created(private=None)
            )

    def _model_folder(self) -> Path:
        """The folder whose files are pushed: the output folder, or a new one if that is a URL; a collective."""
        if not is_url(self.args.output_dir):
            return self._working
        self._count += 1
        folder = self._working / f"{PREFIX}model-{self._count}"
        adapt(self.trainer.save_model, "_internal_call")(str(folder), _internal_call=True)
        return folder

    def _put_model(
        self, folder: Path, message: str | None, token: str | None, revision: str | None, options: dict[str, Any]
    ) -> Future[Any]:
        name = options.pop("model_name", None) or self.trainer.hub_model_id.split("/")[-1]
        self.trainer.create_model_card(model_name=name, **options)
        found = {**output_files(self._working), **output_files(folder)}
        files, pickles = without_pickles(found)
        self._tell_left_out(pickles, is_whole=False)
        push = Push(
            "the model",
            self._repository(token, revision),
            Change(dict(files)),
            message or "End of training",
            is_awaited=True,
            folder=folder if folder != self._working else None,
        )
        self.trainer.push_in_progress = self.queue
        return self.queue.put(push)

    def _result(self, future: Future[Any]) -> Any:
        if future.cancelled():
            raise HubError(f"the push to {self.trainer.hub_model_id} was abandoned, because the run was stopped")
        error = future.exception()
        if error is not None:
            raise HubError(f"{error}. The files are in {self.args.output_dir}; call push_to_hub() again") from error
        return future.result()

    def create_model_card(self, **options: Any) -> None:
        """Write README.md, and the file of evaluation results if the dataset is one of the Hub."""
        self._options = self._options.given(**options)
        if not self.trainer.is_world_process_zero():
            return
        for name, content in self._documents().items():
            path = self._working / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _documents(self) -> dict[str, bytes]:
        options, results = self._options, Results.last(self.state.log_history)
        name = options.model_name or (self.trainer.hub_model_id or str(self.args.output_dir)).rstrip("/").split("/")[-1]
        facts = card_facts(self.internals, options, name=name, inherited_license=self._license)
        path = self._working / CARD
        text = card(facts, path.read_text(encoding="utf-8") if path.is_file() else "")
        measured = results_file(
            results,
            metric=self.args.metric_for_best_model,
            datasets=dataset_tags(self.trainer, options),
            tasks=dataset_tasks(self.trainer, options),
        )
        documents = {CARD: text.encode()}
        return documents if measured is None else {**documents, RESULTS_FILE: measured.encode()}

    def _tell_left_out(self, pickles: list[str], *, is_whole: bool) -> None:
        if pickles and sorted(pickles) != self._left_out:
            self._left_out = sorted(pickles)
            effect = "; checkpoints on the Hub cannot be resumed without them" if is_whole else ""
            logger.warning(f"not pushed, because loading a pickle can run code: {', '.join(self._left_out)}{effect}")

    # ---- ranks ------------------------------------------------------------------------------------------------------

    @property
    def _working(self) -> Path:
        return Path(working_folder(self.args.output_dir))

    def _together(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0; its error is raised by every rank."""
        result: Any = None
        problem: Exception | None = None
        if self.trainer.is_world_process_zero():
            try:
                result = action()
            except Exception as error:  # the other ranks wait, so any error is sent to them
                problem = error
        text = self.strategy.broadcast(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        if text is not None:
            raise HubError(text)
        return result

    def _wait(self, is_done: Callable[[float], bool]) -> None:
        """Wait until rank 0 is done, or a signal is received; ranks exchange this often, so that none times out."""
        while self.strategy.any_rank(not is_done(SLICE)):
            if self._is_interrupted():
                return

    def _is_interrupted(self) -> bool:
        return self.strategy.any_rank(self.internals.is_training and bool(self.run.signals.received))


def _has_ended(future: Future[Any], seconds: float) -> bool:
    with suppress(Exception):  # its error is raised where the result is needed
        future.exception(timeout=seconds)
    return future.done()
