"""Collective methods, which all ranks call alike: an error of one rank ends the call on all of them.

Besides the outermost frame of a rank this is the only place that catches everything: whatever a rank raises
in such a method, the others are waiting for it.
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
"""The length of an error message to other ranks, which must be sent at once."""


def rank_alarm_from_error(control: Control, error: BaseException) -> RankAlarm:
    """Return the alarm for this rank's own error."""
    kind, text = type(error).__name__, str(error)
    words = text if isinstance(error, HpcrunError) else f"{kind}: {text}" if text else kind
    return RankAlarm(control.rank, control.node, words[:_MAX_ERROR_CHARACTERS], _current_turn(control))


def _current_turn(control: Control) -> int:
    """Return the number of the current collective call, or of the next."""
    return control.turn if control.verb else control.turn + 1


def is_raised_on_all(error: BaseException) -> bool:
    """Whether every rank raises this error at the same place."""
    return isinstance(error, HpcrunError) and error.raised_by == "all"


def add_partial_load_warning(error: BaseException) -> None:
    """Add to an error that a load was interrupted."""
    words = "the state is partly filled and must not be used: load again, or build it anew"
    if isinstance(error, HpcrunError):
        error.args = (f"{error}; {words}",)
    else:
        error.add_note(words)


@contextmanager
def collective(control: Control, verb: str, *, agrees: bool = True, meets: bool = True) -> Iterator[None]:
    """Run a block on all ranks or none: they meet at its end, and an error of one is raised on all.

    The first agreement inside checks that all ranks are in the same call. Without `agrees` the block waits
    for no rank, but its errors are sent as well. Without `meets` that agreement also ends the block.
    """
    if control.verb:  # a part of what all do already
        yield
        return
    control.verb, control.is_unverified = verb, agrees
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
        control.verb, control.is_unverified = "", False


class CollectiveObject(Protocol):
    """An object that ranks use together."""

    _control: Control

    def _failed(self, error: BaseException) -> None:
        """Handle an error of a method; unless `is_raised_on_all`, the ranks are at different places."""

    def _let_go(self) -> None:
        """Release everything, without the other ranks."""


def collective_method(verb: str, *, agrees: bool = True, meets: bool = True) -> Callable[[_F], _F]:
    """Decorate a method that all ranks call alike."""

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
    """Begin the collective construction of an object over this control; see `collective_init`."""
    control.verb = "Checkpointer()"
    return control


def collective_init(init: _F) -> _F:
    """Decorate an `__init__` that all ranks call alike, and that sets `_control` first."""

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
"""Controls of ranks that have not left; at exit they alert the ranks that wait."""


def leave_collectives(control: Control, error: BaseException | None = None) -> None:
    """Take part in no further calls; an error is sent to the other ranks."""
    _open_controls.discard(control)
    if error is not None and getattr(error, "raised_by", "one") == "one":
        control.broadcast_alarm(rank_alarm_from_error(control, error))


def _sound_alarm_at_exit() -> None:
    for control in list(_open_controls):
        words = "has ended without close()"
        control.broadcast_alarm(RankAlarm(control.rank, control.node, words, _current_turn(control)))


atexit.register(_sound_alarm_at_exit)
