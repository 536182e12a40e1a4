"""The sixteen events, and which callbacks are called."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from loopwright.core.events import EVENTS, CallbackHandler, TrainerCallback
from loopwright.core.state import TrainerControl, TrainerState


def handler(*callbacks: Any, **context: Any) -> CallbackHandler:
    state = TrainerState(global_step=7)
    return CallbackHandler(callbacks, **context).bind("args", state, TrainerControl())


def recorder(*names: str) -> Any:
    """A callback that listens to these events."""
    seen: list[str] = []

    def method(name: str) -> Any:
        return lambda self, args, state, control, **kwargs: seen.append(name)

    callback = type("Recorder", (TrainerCallback,), {name: method(name) for name in names})()
    callback.seen = seen
    return callback


def test_every_event_is_a_method_of_the_base_class() -> None:
    methods = {name for name, _ in inspect.getmembers(TrainerCallback, inspect.isfunction) if name.startswith("on_")}
    assert methods == set(EVENTS) and len(EVENTS) == 16


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_reaches_those_who_listen_and_clears_what_it_fulfils(event: str) -> None:
    listening, deaf = recorder(event), recorder(*(name for name in EVENTS if name != event))
    events = handler(listening, deaf)
    flags = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
    for flag in flags:
        setattr(events.control, flag, True)
    assert events.fire(event) is events.control
    assert (listening.seen, deaf.seen) == ([event], [])
    assert {flag for flag in flags if not getattr(events.control, flag)} == set(EVENTS[event])


def test_the_base_class_listens_to_nothing() -> None:
    events = handler(TrainerCallback())
    assert not any(events.listens(event) for event in EVENTS)


def test_callbacks_are_called_in_order_and_may_come_and_go() -> None:
    order: list[str] = []

    def one(name: str) -> Any:
        return type(name, (TrainerCallback,), {"on_save": lambda self, *a, **k: order.append(name)})

    first, second, third = one("First"), one("Second"), one("Third")
    events = handler(first, second())
    events.fire("on_save")
    events.add_callback(third)
    popped = events.pop_callback(first)
    events.fire("on_save")
    assert order == ["First", "Second", "Second", "Third"]
    assert type(popped) is first and events.pop_callback(first) is None
    assert events.callback_list == "Second\nThird"
    events.remove_callback(events.callbacks[0])
    events.fire("on_save")
    assert order[-1] == "Third" and len(order) == 5


def test_the_list_of_callbacks_may_be_edited_in_place() -> None:
    first, second = recorder("on_save"), recorder("on_save")
    events = handler(first)
    events.fire("on_save")
    events.callbacks[0] = second
    events.fire("on_save")
    assert (len(first.seen), len(second.seen)) == (1, 1)


def test_an_error_says_where_it_comes_from() -> None:
    class Breaks(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyError("lost")

    with pytest.raises(KeyError) as caught:
        handler(Breaks()).fire("on_log", logs={})
    assert caught.value.__notes__ == ["raised in the callback Breaks.on_log at step 7, epoch 0; given: {logs: {}}"]


def test_a_returned_control_is_adopted() -> None:
    class Returns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return TrainerControl(should_save=True, should_training_stop=True)

    events = handler(Returns())
    before = events.control
    assert events.fire("on_step_end") is before
    assert before.should_save and before.should_training_stop and not before.should_log


def test_a_callback_that_spells_out_what_it_takes_gets_no_more() -> None:
    class Strict:
        def on_log(self, args: Any, state: Any, control: Any, logs: Any) -> None:
            self.logs = logs

        def on_step_end(self, args: Any, state: Any, control: Any) -> None:
            self.step = state.global_step

        def on_save(self, args: Any, state: Any, control: Any, model: Any = None) -> None:
            self.model = model

    strict = Strict()
    events = handler(strict, model="the model")
    events.fire("on_log", logs={"loss": 1})
    events.fire("on_step_end")
    events.fire("on_save")
    assert (strict.logs, strict.step, strict.model) == ({"loss": 1}, 7, "the model")


def test_the_old_name_of_the_processing_class_is_served() -> None:
    seen = []

    class Old(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, tokenizer: Any = None, **kwargs: Any) -> None:
            seen.append((tokenizer, kwargs["processing_class"]))

        def on_step_end(self, args: Any, state: Any, control: Any, tokenizer: Any) -> None:
            seen.append(tokenizer)

    events = handler(Old(), processing_class="words")
    events.fire("on_save")
    events.fire("on_step_end")
    assert seen == [("words", "words"), "words"]


def test_a_callback_without_a_dictionary_is_fine() -> None:
    class Slots:
        __slots__ = ()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = True

    assert handler(Slots()).fire("on_save").should_training_stop


def test_a_method_put_on_the_instance_is_heard() -> None:
    callback, seen = TrainerCallback(), []
    callback.on_save = lambda args, state, control, **kwargs: seen.append(args)  # type: ignore[method-assign]
    handler(callback).fire("on_save")
    assert seen == ["args"]


def test_the_calling_style_of_other_handlers_works() -> None:
    seen: list[Any] = []

    class Listens(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            seen.append(metrics)

        on_predict = on_evaluate

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            seen.append(logs)

    events = handler(Listens())
    events.on_evaluate(None, None, None, {"a": 1})
    events.on_predict(None, None, None, {"b": 2})
    events.on_log(None, None, None, {"c": 3})
    events.call_event("on_log", None, None, None, logs={"d": 4})
    assert seen == [{"a": 1}, {"b": 2}, {"c": 3}, {"d": 4}]
    for event in ("on_save", "on_prediction_step"):
        assert getattr(events, event)(None, None, None) is events.control


def test_pace_is_for_those_who_name_it() -> None:
    told: list[Any] = []

    class Names(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, pace: Any = None, **kwargs: Any) -> None:
            told.append((pace, "logs" in kwargs))

    class TakesAll(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.append(sorted(kwargs))

    events = handler(Names(), TakesAll())
    events.pace = {"tokens_per_second": 1.0}
    events.fire("on_log", logs={})
    events.pace = None
    events.fire("on_log", logs={})
    assert told[0] == ({"tokens_per_second": 1.0}, True) and told[2] == (None, True)
    assert "pace" not in told[1] and told[1] == told[3]
