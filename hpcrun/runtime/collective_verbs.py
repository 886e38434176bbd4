"""What all ranks do alike: what ends it on one rank ends it on all, with that rank's words.

This is the one place besides the outermost frame of a rank that catches everything: whatever a rank raises
in a method that all ranks call together, the others are waiting for it.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from hpcrun.errors import HpcrunError
from hpcrun.runtime.rank_alarm import (
    RankAlarm,
)

if TYPE_CHECKING:
    from hpcrun.runtime.control import Control

_F = TypeVar("_F", bound=Callable[..., Any])
_E = TypeVar("_E", bound=HpcrunError)
_MAX_ERROR_CHARACTERS = 2000
"""Of an error, in characters: what one rank tells all others must be on its way at once."""


def rank_alarm_from_error(control: Control, error: BaseException) -> RankAlarm:
    """A rank's own error, in its words."""
    kind, text = type(error).__name__, str(error)
    words = text if isinstance(error, HpcrunError) else f"{kind}: {text}" if text else kind
    return RankAlarm(control.rank, control.node, words[:_MAX_ERROR_CHARACTERS], _current_turn(control))


def _current_turn(control: Control) -> int:
    """What this rank does with the others, or would do next."""
    return control.turn if control.verb else control.turn + 1


def is_raised_on_all(error: BaseException) -> bool:
    """Whether every rank raises it at the same place."""
    return isinstance(error, HpcrunError) and error.raised_by == "all"


def add_partial_load_warning(error: BaseException) -> None:
    """Say with an error that a load has ended in its middle."""
    words = "the state is partly filled and must not be used: load again, or build it anew"
    if isinstance(error, HpcrunError):
        error.args = (f"{error}; {words}",)
    else:
        error.add_note(words)


@contextmanager
def collective(control: Control, verb: str, *, agrees: bool = True, meets: bool = True) -> Iterator[None]:
    """All ranks do this, or none: they meet at the end, and an error of one is an error of all.

    That all mean the same is told by the first agreement inside. Without `agrees` it waits for nobody, but
    what it raises is told as well. Without `meets` that agreement is the last thing inside, and its end too.
    """
    if control.verb:  # a part of what all do already
        yield
        return
    control.verb, control.is_unproved = verb, agrees
    control.turn += agrees
    try:
        yield
        if agrees and meets:
            control.barrier()
    except BaseException as error:
        whose = error.raised_by if isinstance(error, HpcrunError) else "one"
        if whose == "one":
            control.broadcast_alarm(rank_alarm_from_error(control, error))
        if whose != "all":
            control.reset_after_alarm()
        raise
    finally:
        control.verb, control.is_unproved = "", False


class CollectiveObject(Protocol):
    """Something that ranks use together."""

    _control: Control

    def _failed(self, error: BaseException) -> None:
        """A method has ended with this; unless `is_raised_on_all`, ranks are no longer at the same place."""

    def _let_go(self) -> None:
        """Of all that was opened, asking no other rank."""


def collective_method(verb: str, *, agrees: bool = True, meets: bool = True) -> Callable[[_F], _F]:
    """A method that all ranks call alike."""

    def decorate(method: _F) -> _F:
        @functools.wraps(method)
        def call(self: CollectiveObject, *words: Any, **options: Any) -> Any:
            name = f"{verb}(wait=True)" if options.get("wait") else verb
            try:
                with collective(self._control, name, agrees=agrees, meets=meets):
                    return method(self, *words, **options)
            except BaseException as error:
                self._failed(error)
                raise

        return cast(_F, call)

    return decorate


def begin_collective_init(control: Control) -> Control:
    """What is about to be opened over this control is opened by all ranks together; see `opened`."""
    control.verb = "Checkpointer()"
    return control


def collective_init(init: _F) -> _F:
    """An `__init__` that all ranks call alike, and which first of all sets the control."""

    @functools.wraps(init)
    def call(self: CollectiveObject, *words: Any, **options: Any) -> None:
        control: Control | None = None
        try:
            init(self, *words, **options)
            control = self._control
            control.barrier()
            control.verb = ""
            _open_controls.add(control)
        except BaseException as error:
            control = getattr(self, "_control", None)
            if control is not None:
                leave_collectives(control, error)
            self._let_go()
            raise

    return cast(_F, call)


_open_controls: weakref.WeakSet[Control] = weakref.WeakSet()
"""A rank that ends before it has left says so to those that wait for it."""


def leave_collectives(control: Control, error: BaseException | None = None) -> None:
    """This rank takes part in nothing more; with an error, the others hear of that."""
    _open_controls.discard(control)
    if error is not None and getattr(error, "raised_by", "one") == "one":
        control.broadcast_alarm(rank_alarm_from_error(control, error))


def _sound_alarm_at_exit() -> None:
    for control in list(_open_controls):
        words = "has ended without close()"
        control.broadcast_alarm(RankAlarm(control.rank, control.node, words, _current_turn(control)))


atexit.register(_sound_alarm_at_exit)
