"""Parity: whatever is lost, as long as it is no more than the parity, comes back byte for byte."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence

import pytest

from hpcrun.checkpoint.parity.erasure import (
    BlockRead,
    NotEnoughBlocksError,
    StripeGeometry,
    encode_stripe,
    erasure_code_for,
    rebuild_block,
)
from hpcrun.errors import SiteError


class Set:
    """The blocks and parity blocks of all members, in memory."""

    def __init__(self, blocks: Sequence[bytes], parity: int, window: int = 1 << 20) -> None:
        self.blocks, self.window = blocks, window
        self.geometry = StripeGeometry(tuple(map(len, blocks)), parity)
        size = self.geometry.chunk_bytes
        self.kept = [[bytearray(size) for _ in range(parity)] for _ in blocks]
        self.read: list[BlockRead] = []
        for stripe in range(len(blocks)):

            def put(number: int, at: int, data: memoryview, stripe: int = stripe) -> None:
                self.kept[self.geometry.holder(stripe, number)][number][at : at + len(data)] = data

            encode_stripe(self.geometry, stripe, self.fetch, put, window)

    def fetch(self, wanted: Sequence[BlockRead]) -> Callable[[], None]:
        self.read += wanted

        def fill() -> None:
            for one in wanted:
                source = self.blocks[one.member] if one.parity is None else self.kept[one.member][one.parity]
                data = source[one.at : one.at + len(one.into)]
                assert len(data) == len(one.into), "asked for bytes that are not there"
                one.into[:] = data

        return fill

    def again(self, member: int, lost: Sequence[int]) -> bytes:
        left = [one for one in range(len(self.blocks)) if one not in lost]
        made = bytearray(len(self.blocks[member]))

        def put(chunk: int, at: int, data: memoryview) -> None:
            begin = chunk * self.geometry.chunk_bytes + at
            made[begin : begin + len(data)] = data

        kept = {one: range(self.geometry.parity) for one in left}
        self.read = []
        rebuild_block(self.geometry, member, left, kept, self.fetch, put, self.window)
        assert not {one.member for one in self.read} & set(lost)
        return bytes(made)


SIZES: list[Callable[[random.Random], int]] = [
    lambda _: 0,
    lambda _: 1,
    lambda _: 4096,
    lambda draw: draw.randrange(200),
    lambda draw: 2 * draw.randrange(5000) + 1,
    lambda draw: draw.randrange(60_000),
]


SETS = [(members, parity) for members in range(2, 7) for parity in (1, 2) if parity < members]


@pytest.mark.parametrize(("members", "parity"), SETS)
@pytest.mark.parametrize("seed", range(6))
def test_all_losses_that_are_promised_are_made_good(members: int, parity: int, seed: int) -> None:
    draw = random.Random(f"{members} {parity} {seed}")
    blocks = [draw.randbytes(draw.choice(SIZES)(draw)) for _ in range(members)]
    kept = Set(blocks, parity, window=draw.choice([64, 1000, 1 << 20]))
    for count in range(1, parity + 1):
        for lost in itertools.combinations(range(members), count):
            for member in lost:
                assert kept.again(member, lost) == blocks[member], (lost, member)


def test_one_more_is_too_much_and_is_said() -> None:
    kept = Set([bytes([n]) * 1000 for n in range(5)], 2)
    with pytest.raises(NotEnoughBlocksError, match=r"2 pieces of stripe . are left, and it takes 3"):
        kept.again(0, (0, 1, 2))


@pytest.mark.parametrize(("sizes", "parity"), [((0, 0), 1), ((0, 0, 0), 2), ((1, 0, 0, 0), 1)])
def test_next_to_nothing(sizes: tuple[int, ...], parity: int) -> None:
    kept = Set([b"\7" * size for size in sizes], parity)
    assert [kept.again(member, (member,)) for member in range(len(sizes))] == list(kept.blocks)


def test_only_bytes_that_are_there_are_asked_for() -> None:
    kept = Set([b"a" * 100_000, b"b", b"", b"c" * 70], 1, window=4096)
    assert sum(len(one.into) for one in kept.read) == 100_071
    assert all(kept.geometry.sizes[one.member] >= one.at + len(one.into) for one in kept.read)


@pytest.mark.parametrize(("members", "parity"), [(m, k) for m in range(2, 9) for k in (1, 2) if k < m])
def test_every_stripe_has_one_piece_on_each_member(members: int, parity: int) -> None:
    geometry = StripeGeometry((1000,) * members, parity)
    for stripe in range(members):
        owners = [geometry.owner(stripe, piece) for piece in range(members)]
        assert sorted(owners) == list(range(members))
        assert owners[geometry.data :] == [geometry.holder(stripe, number) for number in range(parity)]
        for number, owner in enumerate(owners[geometry.data :]):
            assert geometry.kept(owner, number) == stripe
            assert geometry.chunk(owner, stripe) is None
        for owner in owners[: geometry.data]:
            chunk = geometry.chunk(owner, stripe)
            assert chunk is not None
            assert geometry.stripe(owner, chunk) == stripe
    share = members - parity
    assert geometry.chunk_bytes * share >= 1000 > (geometry.chunk_bytes - 64) * share


def test_two_members_hold_copies_of_each_other() -> None:
    kept = Set([b"first" * 20, b"second"], 1)
    assert bytes(kept.kept[1][0]).rstrip(b"\0") == b"first" * 20
    assert bytes(kept.kept[0][0]).rstrip(b"\0") == b"second"


def test_what_is_stored_does_not_depend_on_the_windows() -> None:
    blocks = [random.Random(n).randbytes(10_000 + 777 * n) for n in range(6)]
    assert Set(blocks, 2, window=1 << 20).kept == Set(blocks, 2, window=333).kept


def test_stored_parity_is_what_it_was() -> None:
    """Nodes of a set may have other versions of the library, so the code itself is pinned.

    Parity p is the sum of chunk c over (D + p) xor c, in GF(2^8) with the polynomial 0x11d.
    """

    def times(a: int, b: int) -> int:
        made = 0
        for bit in range(8):
            made ^= (a << bit) * (b >> bit & 1)
        for bit in range(14, 7, -1):
            made ^= (0x11D << bit - 8) * (made >> bit & 1)
        return made

    inverse = {a: next(b for b in range(1, 256) if times(a, b) == 1) for a in range(1, 256)}
    draw = random.Random(1)
    for data in (2, 3, 6, 14):
        chunks = [draw.randbytes(100) for _ in range(data)]
        made = erasure_code_for(data, 2).encode([memoryview(chunk) for chunk in chunks])
        for parity in (0, 1):
            wanted = [0] * 100
            for number, chunk in enumerate(chunks):
                factor = inverse[(data + parity) ^ number]
                wanted = [old ^ times(factor, byte) for old, byte in zip(wanted, chunk, strict=True)]
            assert bytes(made[parity]) == bytes(wanted)
    assert bytes(erasure_code_for(3, 1).encode([memoryview(bytes([n])) for n in (1, 2, 7)])[0]) == bytes(
        [1 ^ 2 ^ 7]
    )


@pytest.mark.parametrize(
    ("module", "shape", "instead"), [("pyeclib.ec_iface", (4, 2), "xor"), ("numpy", (4, 1), "partner")]
)
def test_without_a_library_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, shape: tuple[int, int], instead: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    erasure_code_for.cache_clear()
    said = rf"install hpcrun-slurm\[parity\] on every node, or set scheme: {instead}"
    with pytest.raises(SiteError, match=said):
        erasure_code_for(*shape)
    assert erasure_code_for(1, 2).parity == 2
