"""Typed messages over pipes: whole, in order, within limits, and between ends of one version alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hpcrun import __version__
from hpcrun.messages.lines import MessageStream, VersionMismatchError
from hpcrun.typed_json import Tagged, TaggedUnion, WrongValue

GREETING = json.dumps({"hpcrun": __version__}, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True)
class Sum(Tagged):
    """A message of these tests."""

    number: int


class Pipes:
    """A stream, and what stands at its other end."""

    def __init__(self) -> None:
        self.theirs_in, self._writing = os.pipe()
        self._reading, self.theirs_out = os.pipe()
        kinds = TaggedUnion[Sum](Sum)
        self.stream = MessageStream(self._reading, self._writing, kinds, ours="we", theirs="the other")

    def close(self) -> None:
        for descriptor in (self.theirs_in, self._writing, self._reading, self.theirs_out):
            os.close(descriptor)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


def test_messages_come_whole_and_in_order_behind_the_version(pipes: Pipes) -> None:
    pipes.stream.send(Sum(1))
    assert os.read(pipes.theirs_in, 1000) == GREETING + b'{"kind":"sum","number":1}\n'
    os.write(pipes.theirs_out, GREETING + b'{"kind": "sum", "number": 2}\n{"kind": "s')
    assert pipes.stream.receive() == [Sum(2)]
    os.write(pipes.theirs_out, b'um", "number": 3}\n\n')
    assert pipes.stream.receive() == [Sum(3)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"kind": "sum", "number": true}', "sum: number: expected an integer, not True"),
        (b'{"kind": "sum"}', "sum: number: is missing"),
        (b'{"kind": "product"}', "kind: expected one of sum, not 'product'"),
        (b'{"kind": ["sum"]}', "kind: expected one of sum, not ['sum']"),
        (b"[" * 90_000, "expected an object, not None"),
        (b"\xff", "expected an object, not None"),
        (b"7", "expected an object, not None"),
    ],
)
def test_what_makes_no_sense_is_named_and_the_rest_is_read(pipes: Pipes, line: bytes, problem: str) -> None:
    data = GREETING + line + b'\n{"kind": "sum", "number": 4}\n'
    received: list[Sum | WrongValue] = []
    for at in range(0, len(data), 30_000):  # a pipe holds no more than 64 KiB
        os.write(pipes.theirs_out, data[at : at + 30_000])
        received += pipes.stream.receive()
    wrong, right = received
    assert isinstance(wrong, WrongValue)
    assert (str(wrong), right) == (problem, Sum(4))


def test_another_version_is_refused_once_and_nothing_more_is_read(pipes: Pipes) -> None:
    os.write(pipes.theirs_out, b'{"hpcrun": "0.0.9"}\n{"kind": "sum", "number": 1}\n')
    words = f"the other runs hpcrun 0.0.9, we {__version__}; install one version on all nodes"
    with pytest.raises(VersionMismatchError, match=re.escape(words)):
        pipes.stream.receive()
    assert (pipes.stream.is_closed, pipes.stream.receive()) == (True, [])


@pytest.mark.parametrize("line", [b'{"kind": "sum", "number": 1}', b"GET / HTTP/1.1", b'{"hpcrun": 3}'])
def test_an_end_that_says_no_version_is_not_heard(pipes: Pipes, line: bytes) -> None:
    os.write(pipes.theirs_out, line + b'\n{"kind": "sum", "number": 1}\n')
    assert pipes.stream.receive() == []
    assert (pipes.stream.is_closed, pipes.stream.why) == (True, "the other does not say its version")


def test_an_end_that_takes_nothing_is_gone_after_so_many_bytes(pipes: Pipes) -> None:
    pipes.stream._max_unsent = 1 << 18
    for number in range(20_000):
        pipes.stream.send(Sum(number))
    assert pipes.stream.is_closed


def test_a_line_that_is_longer_than_allowed_ends_it(pipes: Pipes) -> None:
    pipes.stream._max_line_bytes = 1000
    os.write(pipes.theirs_out, GREETING + b"x" * 2000)
    assert pipes.stream.receive() == []
    assert (pipes.stream.is_closed, pipes.stream.why) == (True, "what came is longer than any message")
