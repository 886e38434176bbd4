"""Inspecting a corpus: what is counted, how it is split, and one clear line for whatever is wrong."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from hpcrun.data import corpus as corpus_module
from hpcrun.data import tokenize as prepare_module
from hpcrun.data.corpus import Corpus, HoldoutSplit, inspect_corpus, load_token_sidecar
from hpcrun.data.tokenize import tokenize_files
from hpcrun.errors import SiteError, UsageError
from hpcrun.specs.data import DataSpec


def inspect(**data: object) -> Corpus:
    return inspect_corpus(DataSpec.model_validate(data))


def text_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def token_file(path: Path, tokens: list[int], /, **sidecar: object) -> Path:
    path.write_bytes(b"".join(token.to_bytes(2, "little") for token in tokens))
    says = {"format_version": 1, "dtype": "uint16", "tokens": len(tokens), "vocab": 300, **sidecar}
    Path(f"{path}.json").write_text(json.dumps({k: v for k, v in says.items() if v != "absent"}))
    return path


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": "a", "tokens": "b"},
        {"text": "a", "dtype": "uint16"},
        {"tokens": "a", "pattern": "*.txt"},
        {"text": ""},
        {"text": "a", "seq_len": 0},
        {"text": "a", "holdout": 1.0},
        {"text": "a", "shufle": True},
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DataSpec.model_validate(fields)


def test_every_field_is_described() -> None:
    properties = DataSpec.model_json_schema()["properties"]
    assert all(field.get("description") for field in properties.values())


def test_text_is_every_file_sorted_each_with_its_separator(tmp_path: Path) -> None:
    root = text_tree(tmp_path, {"b.txt": b"bbb", "a/z.txt": b"\xff\xfe", "a.txt": b"aa", "empty.txt": b""})
    corpus = inspect(text=str(root), seq_len=2, holdout=0.0)
    assert [(file.path, file.size_bytes) for file in corpus.files] == [
        ("a.txt", 2),
        ("a/z.txt", 2),
        ("b.txt", 3),
    ]
    assert (corpus.tokens, corpus.vocab, corpus.documents) == (10, 256, 3)
    assert (corpus.sequences, corpus.train_sequences, corpus.eval_sequences) == (4, 4, 0)
    assert bytes(corpus.read(1, 9)) == b"a\0\xff\xfe\0bbb\0"
    assert corpus.locate(6) == (root / "b.txt", 0)


def test_pattern_hidden_files_links_and_special_files(tmp_path: Path) -> None:
    root = text_tree(
        tmp_path / "data",
        {
            "keep.txt": b"x" * 9,
            "sub/keep.txt": b"x" * 9,
            "no.log": b"x",
            ".hidden.txt": b"x",
            ".git/c.txt": b"x",
        },
    )
    (root / "sub/up").symlink_to(root)
    (root / "self.txt").symlink_to("self.txt")
    os.mkfifo(root / "pipe.txt")
    (tmp_path / "elsewhere.txt").write_bytes(b"linked")
    (root / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    corpus = inspect(text=str(root), pattern="*.txt", seq_len=4, holdout=0.0)
    assert [file.path for file in corpus.files] == ["keep.txt", "link.txt", "sub/keep.txt"]
    corpus = inspect(text=str(root), pattern="sub/*.txt", seq_len=4, holdout=0.0)
    assert [file.path for file in corpus.files] == ["sub/keep.txt"]


def test_files_with_nul_bytes_are_left_out_and_named(tmp_path: Path) -> None:
    root = text_tree(tmp_path, {"a.txt": b"text" * 9, "b.bin": b"\x7fELF\0\0"})
    corpus = inspect(text=str(root), seq_len=4, holdout=0.0)
    assert [file.path for file in corpus.files] == ["a.txt"]
    assert corpus.skipped == (("b.bin", "has NUL bytes, which separate documents"),)


def test_the_standard_library_is_a_corpus() -> None:
    corpus = inspect(text="python-stdlib")
    names = [file.path for file in corpus.files]
    assert "json/decoder.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert corpus.tokens > 1_000_000


def test_fingerprint_tells_changed_data_and_not_moved_data(tmp_path: Path) -> None:
    files = {"a.txt": b"a" * 50, "b.txt": b"b" * 50}
    one = inspect(text=str(text_tree(tmp_path / "one", files)), seq_len=4).fingerprint
    two = inspect(text=str(text_tree(tmp_path / "two", files)), seq_len=4).fingerprint
    assert one == two
    longer = inspect(text=str(text_tree(tmp_path / "two", {"b.txt": b"b" * 51})), seq_len=4).fingerprint
    (tmp_path / "one/b.txt").rename(tmp_path / "one/c.txt")
    renamed = inspect(text=str(tmp_path / "one"), seq_len=4).fingerprint
    assert len({one, longer, renamed}) == 3


def test_a_token_file_with_and_without_its_sidecar(tmp_path: Path) -> None:
    path = token_file(tmp_path / "t.bin", list(range(200, 221)), documents=3, tokenizer="tok.json")
    corpus = inspect(tokens=str(path), seq_len=4, holdout=0.0)
    assert (corpus.dtype, corpus.tokens, corpus.vocab, corpus.documents) == ("uint16", 21, 300, 3)
    assert corpus.sequences == 5
    assert corpus.read(19, 2) == [219, 220]
    Path(f"{path}.json").unlink()
    corpus = inspect(tokens=str(path), seq_len=4, holdout=0.0, dtype="uint16")
    assert (corpus.tokens, corpus.vocab, corpus.documents) == (21, None, None)


@pytest.mark.parametrize(
    ("sidecar", "said"),
    [
        ({"tokens": 20}, "its sidecar says 20 tokens; the file is truncated"),
        ({"format_version": 2}, "format_version 2 was written by a newer hpcrun"),
        ({"format_version": "absent"}, "format_version: is missing"),
        ({"dtype": "int8"}, "dtype: expected one of uint16, uint32, not 'int8'"),
        ({"vocab": 70000}, "vocab is 70000; uint16 allows 1 to 65536"),
        ({"tokens": "many"}, "tokens: expected an integer, not 'many'"),
        ({"tokens": True}, "tokens: expected an integer, not True"),
        ({"documents": "x"}, "documents: expected an integer, not 'x'"),
    ],
)
def test_a_wrong_sidecar_is_one_clear_line(tmp_path: Path, sidecar: dict[str, object], said: str) -> None:
    path = token_file(tmp_path / "t.bin", list(range(21)), **sidecar)
    with pytest.raises(UsageError) as caught:
        inspect(tokens=str(path), seq_len=4)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lost", [1, 2, 7])
def test_a_truncated_token_file_is_noticed(tmp_path: Path, lost: int) -> None:
    path = token_file(tmp_path / "t.bin", list(range(21)))
    with path.open("r+b") as file:
        file.truncate(42 - lost)
    with pytest.raises(
        UsageError, match=f"t.bin: {42 - lost} bytes of uint16, but its sidecar says 21 tokens"
    ):
        inspect(tokens=str(path), seq_len=4)


def bad_inputs(root: Path) -> list[tuple[dict[str, object], str]]:
    text_tree(root, {"short.txt": b"abc", "empty.txt": b"", "nul.txt": b"a\0", "odd.bin": b"123"})
    text_tree(root, {"dir/a.log": b"x", "links/x.txt": b"x", "bin.bin": b"1234", "list.bin": b"1" * 40})
    (root / "links/gone").symlink_to(root / "nowhere")
    (root / "bin.bin.json").write_text("{")
    (root / "list.bin.json").write_text("[]")
    os.mkfifo(root / "pipe")
    return [
        ({"text": "missing"}, "missing: does not exist"),
        ({"tokens": "missing"}, "missing: does not exist"),
        ({"text": "short.txt/below"}, "cannot be read: Not a directory"),
        ({"text": "empty.txt"}, "empty.txt: is empty"),
        ({"text": "pipe"}, "pipe: is neither a file nor a directory"),
        ({"text": "nul.txt"}, "no text in it; nul.txt has NUL bytes"),
        ({"text": "short.txt"}, "4 tokens, a sequence of seq_len 256 takes 257"),
        ({"text": "short.txt", "seq_len": 1}, "holdout 0.02 of 3 sequences leaves none to train on"),
        ({"text": "dir", "pattern": "*.txt"}, "no file that matches '*.txt' has anything in it"),
        ({"text": "links"}, "gone: is a link to nothing"),
        ({"tokens": "dir"}, "dir: is a directory; tokens names one file"),
        ({"tokens": "odd.bin"}, "no odd.bin.json next to it; set dtype: uint16 or uint32"),
        (
            {"tokens": "odd.bin", "dtype": "uint16"},
            "3 bytes of uint16, but that is not a whole number of tokens",
        ),
        ({"tokens": "bin.bin"}, "bin.bin.json: is not JSON"),
        ({"tokens": "list.bin"}, "list.bin.json: expected an object"),
    ]


def test_every_bad_input_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for fields, said in bad_inputs(tmp_path):
        with pytest.raises(UsageError) as caught:
            inspect(**fields)
        assert said in str(caught.value), fields
        assert "\n" not in str(caught.value)


def test_a_dtype_that_contradicts_the_sidecar_is_refused(tmp_path: Path) -> None:
    path = token_file(tmp_path / "t.bin", list(range(20)))
    with pytest.raises(UsageError, match="dtype uint32 was asked for, its sidecar says uint16"):
        inspect(tokens=str(path), seq_len=4, dtype="uint32")


def test_too_much_text_for_memory_is_sent_to_prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "big.txt").open("wb") as file:
        file.truncate((4 << 30) + 1)  # a hole: takes no space and would take seconds to read
    monkeypatch.setattr(corpus_module, "why_not_text", lambda path: pytest.fail("it was read"))
    with pytest.raises(UsageError, match="4 GiB that are read into memory; run `hpcrun data prepare"):
        inspect(text=str(tmp_path))


@pytest.mark.parametrize("holdout", [0.0, 0.001, 0.02, 0.1, 0.5, 0.9])
def test_the_split_shares_no_token_and_drops_little(holdout: float) -> None:
    for sequences in [*range(1, 90), 500, 997, 4096]:
        split = HoldoutSplit.of(sequences, holdout)
        if split.train_sequences < 1:
            assert sequences - max(1, round(sequences * holdout)) < 3
            continue
        train = [split.train(index) for index in range(split.train_sequences)]
        held_out = [split.held_out(index) for index in range(split.eval_sequences)]
        assert train == sorted(set(train))
        assert held_out == sorted(set(held_out))
        assert 0 <= train[0] <= train[-1] < sequences
        touched = {near for one in held_out for near in (one - 1, one, one + 1)}
        assert not touched & set(train)
        assert sequences - len(train) - len(held_out) == 2 * split.blocks
        assert abs(len(held_out) - sequences * holdout) <= max(1, split.blocks)
        assert bool(held_out) == (holdout > 0)


def test_held_out_sequences_are_spread_over_the_corpus() -> None:
    split = HoldoutSplit.of(10_000, 0.02)
    quarters = {split.held_out(index) * 4 // 10_000 for index in range(split.eval_sequences)}
    assert quarters == {0, 1, 2, 3}


def test_prepared_bytes_are_the_bytes_of_the_text(tmp_path: Path) -> None:
    files = {"a.txt": "grün\n".encode() * 9, "b.txt": b"\xff" * 20, "c.png": b"\x89\0"}
    root = text_tree(tmp_path / "text", files)
    made = tokenize_files([str(root)], tmp_path / "t.bin")
    assert made.skipped == ((str(root / "c.png"), "has NUL bytes, which separate documents"),)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin", "t.bin.json", "text"]
    assert load_token_sidecar(made.path) == made.sidecar
    from_tokens = inspect(tokens=str(made.path), seq_len=4)
    from_text = inspect(text=str(root), seq_len=4)
    assert from_tokens.tokens == from_text.tokens
    assert from_tokens.documents == from_text.documents == 2
    assert from_tokens.read(0, from_tokens.tokens) == from_text.read(0, from_text.tokens)
    wide = tokenize_files([str(root)], tmp_path / "w.bin", dtype="uint32")
    assert inspect(tokens=str(wide.path), seq_len=4).read(40, 30) == from_text.read(40, 30)


def test_the_fingerprint_of_prepared_tokens_sees_a_change_of_content(tmp_path: Path) -> None:
    prints = set()
    for content in (b"a" * 99, b"b" * 99):
        (tmp_path / "t.txt").write_bytes(content)
        made = tokenize_files([str(tmp_path / "t.txt")], tmp_path / "t.bin", force=True)
        prints.add(inspect(tokens=str(made.path), seq_len=4).fingerprint)
    assert len(prints) == 2


def tokenizer_file(path: Path, special: str) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the hat\n\n  sat on that\n"] * 20, trainer)
    tokenizer.save(str(path))
    return path


def test_prepared_tokens_decode_to_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer

    monkeypatch.setattr(prepare_module, "_PIECE", 64)  # so that a document takes many pieces
    long = "".join(f"the cat {n} sat\n\n  on ünï {'thaté' * (n % 40)} <eos>\n" for n in range(50))
    root = text_tree(tmp_path / "text", {"a.txt": b"the cat", "b.txt": long.encode(), "c.txt": b"latin \xe9"})
    path = tokenizer_file(tmp_path / "tokenizer.json", "<eos>")
    seen: list[tuple[int, int]] = []
    made = tokenize_files(
        [str(root)],
        tmp_path / "t.bin",
        tokenizer=str(path),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert made.skipped == ((str(root / "c.txt"), "is not UTF-8"),)
    assert made.sidecar.documents == 2
    assert seen[-1] == (7 + len(long.encode()), 7 + len(long.encode()) + 7)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id("<eos>")
    assert made.sidecar.separator == end
    corpus = inspect(tokens=str(made.path), seq_len=4)
    assert corpus.vocab == tokenizer.get_vocab_size()
    ids = corpus.read(0, corpus.tokens)
    assert ids == [*tokenizer.encode("the cat").ids, end, *tokenizer.encode(long).ids, end]


def test_the_end_of_document_token_is_configured_known_or_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat")
    path = tokenizer_file(tmp_path / "tokenizer.json", "<fin>")

    def separator(eos: str | None = None) -> int | None:
        sources = [str(tmp_path / "a.txt")]
        return tokenize_files(
            sources, tmp_path / "t.bin", tokenizer=str(path), eos=eos, force=True
        ).sidecar.separator

    with pytest.raises(UsageError, match="no known end-of-document token in it; name one with --eos"):
        separator()
    with pytest.raises(UsageError, match="has no token '<end>'"):
        separator("<end>")
    assert separator("<fin>") == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<fin>"}}')
    assert separator() == 0


def test_what_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text")
    out = tmp_path / "t.bin"
    tokenize_files([str(tmp_path)], out)
    with pytest.raises(UsageError, match="exists already; use --force"):
        tokenize_files([str(tmp_path / "a.txt")], out)
    (tmp_path / "a.txt").write_bytes(b"longer text")
    made = tokenize_files([str(tmp_path)], out, force=True)
    assert made.sidecar.tokens == len("longer text") + 1
    with pytest.raises(UsageError, match="the output is the only source"):
        tokenize_files([str(out)], out, force=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokenizer": "missing.json"}, "missing.json: no such tokenizer file; use bytes or"),
        ({"tokenizer": "a.txt"}, "a.txt: is not a tokenizer.json"),
        ({"dtype": "int8"}, "--dtype int8: use uint16 or uint32"),
        ({"eos": "x"}, "--eos is for a tokenizer.json"),
        ({"sources": ["missing"]}, "missing: does not exist"),
        ({"sources": ["nul.txt"]}, "no text in it; nul.txt has NUL bytes"),
        ({"out": Path("no/t.bin")}, "there is no directory no; create it first"),
    ],
)
def test_what_cannot_be_prepared_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text_tree(tmp_path, {"a.txt": b"text", "nul.txt": b"\0"})
    arguments: dict[str, object] = {"sources": ["a.txt"], "out": Path("t.bin"), **options}
    with pytest.raises(UsageError) as caught:
        tokenize_files(**arguments)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "nul.txt"]


def test_a_missing_tokenizers_package_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SiteError, match=r"pip install 'hpcrun-slurm\[tokenizers\]'"):
        tokenize_files([str(tmp_path)], tmp_path / "t.bin", tokenizer="tokenizer.json")


def test_a_full_disk_is_one_line_before_and_during(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"text" * 100)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=700))
        with pytest.raises(SiteError, match=r"takes at least 802 B, .* has 700 B free"):
            tokenize_files([str(tmp_path / "a.txt")], tmp_path / "t.bin")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(SiteError, match="no space or quota left while it was written"):
            tokenize_files([str(tmp_path / "a.txt")], tmp_path / "t.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
