"""Batches: every rank its share, the same samples for every number of ranks, exact after a resume."""

import json
import threading
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrun.data.corpus import inspect_corpus
from hpcrun.errors import UsageError
from hpcrun.runtime.data_loader import Batches, TokenSource, eval_batches, permute_indices
from hpcrun.specs.data import DataSpec

S = 4
GOLDEN = [
    533,
    777,
    232,
    836,
    326,
    231,
    219,
    999,
    360,
    862,
]  # of permute(range(10), 1000, seed 1, epoch 0), worked out in plain integers


def counting_source(directory: Path, sequences: int, **data: object) -> TokenSource:
    """A token file whose token t is t itself, so that a batch tells which sequences it holds."""
    path = directory / "count.bin"
    tokens = np.arange(sequences * S + 1, dtype="<u4")
    tokens.tofile(path)
    Path(f"{path}.json").write_text(
        json.dumps({"format_version": 1, "dtype": "uint32", "tokens": len(tokens), "vocab": 1 << 20})
    )
    spec = DataSpec.model_validate({"tokens": str(path), "seq_len": S, "holdout": 0.0, **data})
    return TokenSource(spec, inspect_corpus(spec))


def ids(inputs: torch.Tensor) -> list[int]:
    """The sequences in a batch of a counting source."""
    return (inputs.reshape(-1, S)[:, 0] // S).tolist()


def steps(source: TokenSource, count: int, *, dp_size: int, **options: int) -> list[list[list[int]]]:
    """The sequences of `count` steps: a list a step, of a list a rank."""
    settings = {"seed": 7, "gbs": 8, "mbs": 1, "start_sample": 0, **options}
    ranks = []
    for dp_rank in range(dp_size):
        with Batches(source, seq_len=S, dp_rank=dp_rank, dp_size=dp_size, **settings) as batches:
            ranks.append([ids(next(batches)[0]) for _ in range(count)])
    return [list(step) for step in zip(*ranks, strict=True)]


def union(step: list[list[int]]) -> list[int]:
    return sorted(sequence for rank in step for sequence in rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 97, 127, 128, 1000, 1009, 4097])
def test_the_permutation_is_a_bijection(size: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (-3, 5), (1 << 70, 1 << 40)):
        assert sorted(permute_indices(range(size), size, seed, epoch).tolist()) == list(range(size))


def test_the_permutation_is_a_fixed_format_and_depends_on_seed_and_epoch() -> None:
    first = permute_indices(range(10), 1000, 1, 0).tolist()
    assert first == GOLDEN
    assert permute_indices([4], 1000, 1, 0).tolist() == GOLDEN[4:5]
    assert first != permute_indices(range(10), 1000, 2, 0).tolist()
    assert first != permute_indices(range(10), 1000, 1, 1).tolist()
    assert permute_indices([1 << 40], (1 << 40) + 15, 1, 0)[0] <= (1 << 40) + 14


def test_the_permutation_has_no_drift() -> None:
    order = permute_indices(range(20_000), 20_000, 3, 0).astype(np.float64)
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03


def test_shapes_and_shift(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 50)
    with Batches(source, seq_len=S, seed=1, gbs=12, mbs=2, dp_rank=1, dp_size=3) as batches:
        inputs, targets = next(batches)
    assert inputs.shape == targets.shape == (2, 2, S)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_an_epoch_is_covered_once_without_overlap(tmp_path: Path, dp_size: int) -> None:
    source = counting_source(tmp_path, 40)
    epochs = []
    for epoch in range(3):
        seen = [union(step) for step in steps(source, 5, dp_size=dp_size, start_sample=40 * epoch)]
        assert sorted(chain(*seen)) == list(range(40))
        epochs.append(seen)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_union_of_a_step_does_not_depend_on_ranks_or_micro_batches(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 37)  # an epoch ends inside a batch
    expected = [union(step) for step in steps(source, 12, dp_size=1)]
    for dp_size, mbs in ((1, 8), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)):
        assert [union(step) for step in steps(source, 12, dp_size=dp_size, mbs=mbs)] == expected
    in_order = [sequence for step in steps(source, 12, dp_size=1) for sequence in step[0]]
    assert sorted(in_order[:37]) == sorted(in_order[37:74]) == list(range(37))


def test_a_batch_larger_than_the_corpus_takes_whole_epochs(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 3)
    assert union(steps(source, 1, dp_size=2, gbs=12)[0]) == sorted([0, 1, 2] * 4)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 4)])
def test_a_resume_with_another_dp_degree_goes_on_exactly(tmp_path: Path, before: int, after: int) -> None:
    source = counting_source(tmp_path, 37)
    whole = [union(step) for step in steps(source, 9, dp_size=1)]
    for done in range(1, 9):
        with Batches(source, seq_len=S, seed=7, gbs=8, mbs=2, dp_rank=0, dp_size=before) as batches:
            for _ in range(done):
                next(batches)
            position = batches.position
        assert position == 8 * done
        rest = steps(source, 9 - done, dp_size=after, mbs=2, start_sample=position)
        assert [union(step) for step in rest] == whole[done:]


def test_a_resume_may_start_at_any_sample_and_with_another_batch_size(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 37)
    order = [sequence for step in steps(source, 12, dp_size=1) for sequence in step[0]]
    for start in range(40):
        rest = [union(step) for step in steps(source, 2, dp_size=2, gbs=6, start_sample=start)]
        assert rest == [sorted(order[start : start + 6]), sorted(order[start + 6 : start + 12])]


def test_without_shuffle_the_order_is_the_stored_one(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 10, shuffle=False)
    assert [step[0] for step in steps(source, 2, dp_size=1)] == [list(range(8)), [8, 9, 0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("holdout", [0.02, 0.1, 0.5])
def test_held_out_tokens_are_never_trained_on(tmp_path: Path, holdout: float) -> None:
    source = counting_source(tmp_path, 400, holdout=holdout)
    trained: set[int] = set()
    with Batches(source, seq_len=S, seed=1, gbs=50, mbs=50, dp_rank=0, dp_size=1) as batches:
        while batches.position < source.corpus.train_sequences:
            for part in next(batches):
                trained.update(part.flatten().tolist())
    evaluated = {
        token
        for batch in eval_batches(
            source, gbs=1, mbs=1, rounds=1, dp_rank=0, dp_size=1, sequences=source.corpus.eval_sequences
        )
        for part in batch
        for token in part.flatten().tolist()
    }
    assert len(evaluated) > 400 * S * holdout * 0.9
    assert not trained & evaluated


def test_eval_gives_every_rank_as_many_and_none_twice(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 1000, holdout=0.05)
    assert source.corpus.eval_sequences == 48
    shape = {"gbs": 10, "mbs": 2, "sequences": 40}
    alone = [list(eval_batches(source, dp_rank=0, dp_size=1, rounds=5, **shape))]
    ranks = [list(eval_batches(source, dp_rank=rank, dp_size=5, rounds=1, **shape)) for rank in range(5)]
    assert [len(rank) for rank in ranks] == [4] * 5
    sequences = [sorted(i for rank in world for x, _ in rank for i in ids(x)) for world in (alone, ranks)]
    assert sequences[0] == sequences[1]
    assert len(set(sequences[0])) == 40
    assert max(sequences[0]) > 750


def test_text_is_read_with_its_separators(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "b.txt").write_bytes(b"\xff" * 4)
    spec = DataSpec(text=str(tmp_path), seq_len=8, holdout=0.0, shuffle=False)
    source = TokenSource(spec, inspect_corpus(spec))
    with Batches(source, seq_len=8, seed=0, gbs=1, mbs=1, dp_rank=0, dp_size=1) as batches:
        inputs, targets = next(batches)
    assert bytes(inputs.flatten().tolist()) == b"abc\0\xff\xff\xff\xff"
    assert bytes(targets.flatten().tolist()) == b"bc\0\xff\xff\xff\xff\0"


@pytest.mark.parametrize("content", [b"abcdefg", b"abcdefghi"])
def test_data_that_changed_since_it_was_inspected_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data"
    for fields in ({"text": str(path)}, {"tokens": str(path), "dtype": "uint16"}):
        path.write_bytes(b"abcdefgh")
        spec = DataSpec.model_validate({"seq_len": 2, "holdout": 0.0, **fields})
        corpus = inspect_corpus(spec)
        path.write_bytes(content)
        with pytest.raises(UsageError, match="data: is no longer 8 bytes"):
            TokenSource(spec, corpus)
        path.unlink()
        with pytest.raises(UsageError, match="data: cannot be read: No such file"):
            TokenSource(spec, corpus)


def test_an_id_beyond_the_vocab_names_file_place_and_id_every_time(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 10, shuffle=False, holdout=0.1)
    with Batches(source, seq_len=S, seed=0, gbs=1, mbs=1, dp_rank=0, dp_size=1, vocab=11) as batches:
        next(batches)
        next(batches)
        for _ in range(2):  # the step that failed is never skipped
            with pytest.raises(UsageError, match=r"count.bin: token 11 is 11, the model's vocab is 11"):
                next(batches)
        assert batches.position == 2
    with pytest.raises(UsageError, match="the model's vocab is 11"):
        list(eval_batches(source, gbs=1, mbs=1, rounds=1, dp_rank=0, dp_size=1, sequences=1, vocab=11))
    (tmp_path / "a.txt").write_bytes(b"aaaa")
    (tmp_path / "b.txt").write_bytes(b"aa\xc8aaa")
    spec = DataSpec(text=str(tmp_path), pattern="*.txt", seq_len=10, holdout=0.0)
    text = TokenSource(spec, inspect_corpus(spec))
    with (
        Batches(text, seq_len=10, seed=0, gbs=1, mbs=1, dp_rank=0, dp_size=1, vocab=128) as batches,
        pytest.raises(UsageError, match=r"b.txt: token 2 is 200"),
    ):
        next(batches)


def test_an_error_while_reading_ahead_is_raised_by_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = counting_source(tmp_path, 10)

    def broken(*arguments: object) -> list[int]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(source, "order", broken)
    with (
        Batches(source, seq_len=S, seed=0, gbs=2, mbs=1, dp_rank=0, dp_size=1) as batches,
        pytest.raises(OSError, match="the disk is gone"),
    ):
        next(batches)


def test_close_ends_the_thread_and_the_batches(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 10)
    others = set(threading.enumerate())
    batches = Batches(source, seq_len=S, seed=0, gbs=2, mbs=1, dp_rank=0, dp_size=1)
    next(batches)
    assert set(threading.enumerate()) - others
    batches.close()
    batches.close()
    assert not set(threading.enumerate()) - others
    with pytest.raises(ValueError, match="closed"):
        next(batches)


def test_a_batch_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    source = counting_source(tmp_path, 10)
    with pytest.raises(UsageError, match="gbs 6 is not a multiple of mbs 2 × dp 2 = 4"):
        Batches(source, seq_len=S, seed=0, gbs=6, mbs=2, dp_rank=0, dp_size=2)
    with pytest.raises(ValueError, match="seq_len 8 is not 4"):
        Batches(source, seq_len=8, seed=0, gbs=4, mbs=2, dp_rank=0, dp_size=2)
    with pytest.raises(ValueError, match="no dp_rank 2 of 2"):
        Batches(source, seq_len=S, seed=0, gbs=4, mbs=2, dp_rank=2, dp_size=2)
