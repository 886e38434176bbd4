"""Makes the batches of a data-parallel rank: reads, shuffles, splits and prefetches.

The global order of training samples depends on the seed and the corpus alone, not on the number of ranks or a
library's version: the number of samples consumed is all that a resumed run needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hpcrun.data.corpus import Corpus, CorpusFile
from hpcrun.errors import UsageError
from hpcrun.specs.data import DataSpec

_PREFETCHED_BATCHES = 2
_FEISTEL_ROUNDS = 8
IGNORED_TARGET = -100
"""A target that torch's cross entropy ignores."""

Indices = npt.NDArray[np.uint64]
Batch = tuple[torch.Tensor, torch.Tensor]


def permute_indices(indices: npt.ArrayLike, size: int, seed: int, epoch: int) -> Indices:
    """Map indices (1-D) by a pseudo-random permutation of range(size), drawn by seed and epoch.

    A Feistel network over the next power of four, its steps repeated until they end inside the range; keys
    from BLAKE2b, round function from SplitMix64. Its values are part of the run's format and never change.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    digest = blake2b(
        f"hpcrun order 1 seed {seed} epoch {epoch}".encode(), digest_size=8 * _FEISTEL_ROUNDS
    ).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def network(value: Indices) -> Indices:
        left, right = value >> shift, value & mask
        for key in keys:
            left, right = right, left ^ (_splitmix64(right ^ key) & mask)
        return (left << shift) | right

    value = network(np.asarray(indices, dtype=np.uint64))
    while (outside := value >= np.uint64(size)).any():
        value[outside] = network(value[outside])
    return value


def _splitmix64(value: Indices) -> Indices:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class TokenSource:
    """The tokens of a corpus: token files memory-mapped, text read once into one array of bytes."""

    def __init__(self, data: DataSpec, corpus: Corpus) -> None:
        self.corpus = corpus
        self.seq_len = corpus.seq_len
        self.shuffle = data.shuffle
        self._tokens: npt.NDArray[Any] = (
            _map_token_files(corpus) if corpus.kind == "tokens" else _read_text(corpus)
        )

    def order(self, begin: int, end: int, seed: int) -> list[int]:
        """Return the sequences that are samples begin to end of the training order, epoch after epoch."""
        split, size = self.corpus.split, self.corpus.train_sequences
        order: list[int] = []
        for epoch in range(begin // size, (end - 1) // size + 1):
            first, last = max(begin, epoch * size), min(end, (epoch + 1) * size)
            indices = np.arange(first - epoch * size, last - epoch * size)
            chosen = permute_indices(indices, size, seed, epoch) if self.shuffle else indices
            order.extend(split.train(index) for index in chosen.tolist())
        return order

    def batch(self, sequences: Sequence[int], shape: tuple[int, ...], vocab: int | None) -> Batch:
        """Return inputs and targets, int64 of `shape` + (seq_len,); UsageError for an id past vocab."""
        length = self.seq_len
        rows = np.empty((len(sequences), length + 1), dtype=np.int64)
        for row, sequence in zip(rows, sequences, strict=True):
            row[:] = self._tokens[sequence * length : (sequence + 1) * length + 1]
        if vocab is not None and int(rows.max()) >= vocab:
            row_index, column = divmod(int((rows >= vocab).argmax()), length + 1)
            path, position = self.corpus.locate(sequences[row_index] * length + column)
            raise UsageError(
                f"{path}: token {position} is {rows[row_index, column]}, the model's vocab is {vocab}; "
                "raise model.vocab or prepare the data with the model's tokenizer"
            )
        inputs = torch.from_numpy(np.ascontiguousarray(rows[:, :-1]))
        targets = torch.from_numpy(np.ascontiguousarray(rows[:, 1:]))
        return inputs.reshape(*shape, length), targets.reshape(*shape, length)


def _map_token_files(corpus: Corpus) -> npt.NDArray[Any]:
    path = corpus.root / corpus.files[0].path
    dtype = {"uint16": "<u2", "uint32": "<u4"}[corpus.dtype]
    try:
        if path.stat().st_size != corpus.files[0].size_bytes:
            raise _changed(corpus, corpus.files[0])
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _read_text(corpus: Corpus) -> npt.NDArray[Any]:
    tokens = np.zeros(corpus.tokens, dtype=np.uint8)
    room = tokens.data
    for file, begin in zip(corpus.files, corpus.starts, strict=True):
        path = corpus.root / file.path
        try:
            with path.open("rb") as stream:
                read = stream.readinto(room[begin : begin + file.size_bytes])
                if read != file.size_bytes or stream.read(1):
                    raise _changed(corpus, file)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    return tokens


def _changed(corpus: Corpus, file: CorpusFile) -> UsageError:
    return UsageError(
        f"{corpus.root / file.path}: is no longer {file.size_bytes} bytes, it changed while the job was "
        "starting; start again when no process writes to it"
    )


class Batches:
    """The training batches of one data-parallel rank, without end: an iterator and a context manager.

    Every item is one optimizer step: inputs and targets, int64 of shape (grad_accum, mbs, seq_len).
    The step that begins at sample p takes the samples p to p + gbs of the global order; micro-batch m of
    rank r takes mbs of them from (m * dp_size + r) * mbs on, so that all ranks together see the same for
    every dp_size. With `rounds` every rank gets as many micro-batches, though there may be fewer for it: the
    last ones are then masked, their targets IGNORED_TARGET. A thread reads two steps ahead. `position` is
    the only state: give it as `start_sample` to continue from there.
    """

    def __init__(
        self,
        source: TokenSource,
        *,
        seq_len: int,
        seed: int,
        gbs: int,
        mbs: int,
        dp_rank: int,
        dp_size: int,
        start_sample: int = 0,
        vocab: int | None = None,
        rounds: int | None = None,
    ) -> None:
        if seq_len != source.seq_len:
            raise ValueError(f"seq_len {seq_len} is not {source.seq_len}, with which the corpus was split")
        if not 0 <= dp_rank < dp_size or start_sample < 0:
            raise ValueError(f"no dp_rank {dp_rank} of {dp_size}, or no sample {start_sample}")
        if rounds is not None:
            _check_rounds(gbs, mbs, dp_size, rounds)
        elif gbs < 1 or mbs < 1 or gbs % (mbs * dp_size):
            raise UsageError(
                f"gbs {gbs} is not a multiple of mbs {mbs} × dp {dp_size} = {mbs * dp_size}; "
                "change gbs, mbs or the parallel degrees"
            )
        self._source, self._seed, self._vocab = source, seed, vocab
        self._gbs, self._mbs, self._rank, self._dp_size = gbs, mbs, dp_rank, dp_size
        self._rounds = rounds or gbs // (mbs * dp_size)
        self._position = start_sample
        self._closed = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="hpcrun-data")
        self._reading: deque[Future[Batch]] = deque()
        self._prefetch()

    @property
    def position(self) -> int:
        """How many samples of the global order all ranks have consumed."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise ValueError("these batches are closed")
        batch = self._reading[0].result()  # a failed step stays first: it is raised again, never skipped
        self._reading.popleft()
        self._position += self._gbs
        self._prefetch()
        return batch

    def _prefetch(self) -> None:
        while len(self._reading) < _PREFETCHED_BATCHES:
            begin = self._position + len(self._reading) * self._gbs
            self._reading.append(self._reader.submit(self._step, begin))

    def _step(self, begin: int) -> Batch:
        samples = self._source.order(begin, begin + self._gbs, self._seed)
        mine = _rank_samples(samples, self._mbs, self._rank, self._dp_size)
        return _padded_batch(self._source, mine, self._rounds, self._mbs, self._vocab)

    def close(self) -> None:
        """End the reading thread; a second call does nothing."""
        self._closed = True
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._reading.clear()

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def eval_batches(
    source: TokenSource,
    *,
    gbs: int,
    mbs: int,
    rounds: int,
    dp_rank: int,
    dp_size: int,
    sequences: int,
    vocab: int | None = None,
) -> Iterator[Batch]:
    """Yield the held-out batches of one rank, dealt and masked as by `Batches` with these `rounds`.

    `sequences`, a multiple of gbs, are taken, spread over all that are held out; which ones does not depend
    on the layout.
    """
    _check_rounds(gbs, mbs, dp_size, rounds)
    held_out = source.corpus.eval_sequences
    for begin in range(0, sequences, gbs):
        chosen = [source.corpus.split.held_out(i * held_out // sequences) for i in range(begin, begin + gbs)]
        yield _padded_batch(source, _rank_samples(chosen, mbs, dp_rank, dp_size), rounds, mbs, vocab)


def _check_rounds(gbs: int, mbs: int, dp_size: int, rounds: int) -> None:
    if mbs < 1 or gbs % mbs or not 1 <= -(-gbs // (mbs * dp_size)) <= rounds:
        raise UsageError(
            f"gbs {gbs} does not go into {rounds} rounds of mbs {mbs} × dp {dp_size}; change gbs or mbs"
        )


def _rank_samples(samples: Sequence[int], mbs: int, dp_rank: int, dp_size: int) -> list[int]:
    """Return a rank's share of a step's samples, which are dealt mbs at a time."""
    mine: list[int] = np.asarray(samples).reshape(-1, mbs)[dp_rank::dp_size].ravel().tolist()
    return mine


def _padded_batch(source: TokenSource, mine: list[int], rounds: int, mbs: int, vocab: int | None) -> Batch:
    """Return the micro-batches of a step; those that only fill up the rounds are masked."""
    missing = rounds * mbs - len(mine)
    inputs, targets = source.batch(mine + mine[:1] * missing, (rounds, mbs), vocab)
    if missing:
        targets[rounds - missing // mbs :] = IGNORED_TARGET
    return inputs, targets
