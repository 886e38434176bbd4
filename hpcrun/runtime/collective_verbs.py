"""What all ranks do alike: what ends it on one rank ends it on all, with that rank's words.

This is the one place besides the outermost frame of a rank that catches everything: whatever a rank raises
in a method that all ranks call together, the others are waiting for it.
"""

from __future__ import annotations

import atexit
import functools
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from torch.distributed import DistError

from hpcrun import process
from hpcrun.errors import HpcrunError, RanksDiedError
from hpcrun.process import ProcessId

if TYPE_CHECKING:
    from hpcrun.runtime.control import Control

_F = TypeVar("_F", bound=Callable[..., Any])
_E = TypeVar("_E", bound=HpcrunError)
_MOST_WORDS = 2000
"""Of an error, in characters: what one rank tells all others must be on its way at once."""
_LOOK_S = 1.0
"""Between looks at whether the ranks beside us still run."""

VERBS = ("save", "save(wait=True)", "load", "close", "Checkpointer()", "fence", "should_stop")
"""What ranks do together: seven at most, see `Control.union`."""


@dataclass(frozen=True)
class Alarm:
    """What a rank tells the others that wait for it: it will not come, and why."""

    rank: int
    node: str
    words: str
    turn: int
    """What it does not come to: an earlier one it has come through, and so can the others."""

    def error(self, verb: str) -> RanksDiedError:
        """What the others raise."""
        during = f"{verb}: " if verb else ""
        error = RanksDiedError(f"{during}rank {self.rank} on {self.node}: {self.words}")
        error.raised_by = "another"
        return error

    def render(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()


def parse_alarm(data: bytes) -> Alarm:
    """As another rank has sent it."""
    return Alarm(**json.loads(data))


def alarm_of(control: Control, error: BaseException) -> Alarm:
    """A rank's own error, in its words."""
    kind, text = type(error).__name__, str(error)
    words = text if isinstance(error, HpcrunError) else f"{kind}: {text}" if text else kind
    return Alarm(control.rank, control.node, words[:_MOST_WORDS], _turn_of(control))


def _turn_of(control: Control) -> int:
    """What this rank does with the others, or would do next."""
    return control.turn if control.verb else control.turn + 1


def on_all(error: _E) -> _E:
    """Mark an error that every rank raises at this very place: nobody has to be told of it."""
    error.raised_by = "all"
    return error


def is_alike(error: BaseException) -> bool:
    """Whether every rank raises it at the same place."""
    return isinstance(error, HpcrunError) and error.raised_by == "all"


def warn_of_part(error: BaseException) -> None:
    """Say with an error that a load has ended in its middle."""
    words = "the state is partly filled and must not be used: load again, or build it anew"
    if isinstance(error, HpcrunError):
        error.args = (f"{error}; {words}",)
    else:
        error.add_note(words)


@contextmanager
def joined(control: Control, verb: str, *, agrees: bool = True, meets: bool = True) -> Iterator[None]:
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
            control.sound(alarm_of(control, error))
        if whose != "all":
            control.start_over()
        raise
    finally:
        control.verb, control.is_unproved = "", False


class Joint(Protocol):
    """Something that ranks use together."""

    _control: Control

    def _failed(self, error: BaseException) -> None:
        """A method has ended with this; unless `is_alike`, ranks are no longer at the same place."""

    def _let_go(self) -> None:
        """Of all that was opened, asking no other rank."""


def together(verb: str, *, agrees: bool = True, meets: bool = True) -> Callable[[_F], _F]:
    """A method that all ranks call alike."""

    def decorate(method: _F) -> _F:
        @functools.wraps(method)
        def call(self: Joint, *words: Any, **options: Any) -> Any:
            name = f"{verb}(wait=True)" if options.get("wait") else verb
            try:
                with joined(self._control, name, agrees=agrees, meets=meets):
                    return method(self, *words, **options)
            except BaseException as error:
                self._failed(error)
                raise

        return cast(_F, call)

    return decorate


def opening(control: Control) -> Control:
    """What is about to be opened over this control is opened by all ranks together; see `opened`."""
    control.verb = "Checkpointer()"
    return control


def opened(init: _F) -> _F:
    """An `__init__` that all ranks call alike, and which first of all sets the control."""

    @functools.wraps(init)
    def call(self: Joint, *words: Any, **options: Any) -> None:
        control: Control | None = None
        try:
            init(self, *words, **options)
            control = self._control
            control.barrier()
            control.verb = ""
            _open.add(control)
        except BaseException as error:
            control = getattr(self, "_control", None)
            if control is not None:
                leave(control, error)
            self._let_go()
            raise

    return cast(_F, call)


class Neighbours:
    """The processes of the other ranks of this node: one that was killed cannot say so itself."""

    def __init__(self, told: Sequence[Sequence[Any]], rank: int, node: str) -> None:
        """`told`: of each rank its node, and what `mine` says there."""
        self._looked, self._missed = time.monotonic(), set[int]()
        self._running = {
            other: ProcessId(*one)
            for other, (where, one) in enumerate(told)
            # In a container of its own a rank is not seen here, whatever its node is called.
            if where == node and other != rank and one and process.is_alive(ProcessId(*one))
        }

    @staticmethod
    def mine(pid: int) -> list[int] | None:
        """This process, for others to look at."""
        found = process.identify(pid)
        return None if found is None else list(found)

    def ended(self) -> int | None:
        """A rank that does not run any more, and did not at the last look; looks now and then only."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return None
        # What a rank has done just before its end may be on its way when that is noticed.
        missed = self.missed()
        found = next(iter(sorted(missed & self._missed)), None)
        self._looked, self._missed = now, missed
        return found

    def missed(self) -> set[int]:
        """Ranks that do not run at this moment."""
        return {rank for rank, one in self._running.items() if not process.is_alive(one)}


def of_store(method: _F) -> _F:
    """A method of a control that asks a store, which is gone when the process that has it is."""

    @functools.wraps(method)
    def call(self: Any, *words: Any, **options: Any) -> Any:
        try:
            return method(self, *words, **options)
        except DistError as error:
            ended = sorted(self._neighbours.missed()) if self._neighbours is not None else []
            who = "".join(f"rank {rank} on {self.node}: its process has ended, " for rank in ended[:1])
            first = str(error).partition("\n")[0]
            during = f"{self.verb}: " if self.verb else ""
            raise RanksDiedError(f"{during}{who}the store of the ranks does not answer: {first}") from None

    return cast(_F, call)


_open: weakref.WeakSet[Control] = weakref.WeakSet()
"""A rank that ends before it has left says so to those that wait for it."""


def leave(control: Control, error: BaseException | None = None) -> None:
    """This rank takes part in nothing more; with an error, the others hear of that."""
    _open.discard(control)
    if error is not None and getattr(error, "raised_by", "one") == "one":
        control.sound(alarm_of(control, error))


def _say_at_exit() -> None:
    for control in list(_open):
        words = "has ended without close()"
        control.sound(Alarm(control.rank, control.node, words, _turn_of(control)))


atexit.register(_say_at_exit)
