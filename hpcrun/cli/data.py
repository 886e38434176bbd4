"""`hpcrun data`: make token files, and look at what a job would train on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.terminal import unescaped_stream

if TYPE_CHECKING:
    from hpcrun.data.corpus import Corpus

SCHEMA_VERSION = 1

app = typer.Typer(
    no_args_is_help=True,
    help="Make token files, and look at what a job would train on.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Pattern = Annotated[str, typer.Option(help="Which files of a directory, such as '*.txt'.")]
_Dtype = Annotated[str | None, typer.Option(help="uint16 or uint32.")]


@app.command()
def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SRC...", help="Text files or directories.")],
    out: Annotated[Path, typer.Option(metavar="FILE.bin", help="The token file to write.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, or the path of a tokenizer.json.")] = "bytes",
    eos: Annotated[
        str | None, typer.Option(help="Token that ends a document; default: as configured.")
    ] = None,
    dtype: _Dtype = None,
    pattern: _Pattern = "*",
    force: Annotated[bool, typer.Option("--force", help="Replace FILE.bin if it exists.")] = False,
    as_json: _Json = False,
) -> None:
    """Turn text into a token file that jobs map into memory (data.tokens)."""
    from hpcrun.data import tokenize as core

    show, done = _progress()
    try:
        made = core.tokenize_files(
            sources,
            out,
            tokenizer=tokenizer,
            dtype=dtype,
            pattern=pattern,
            eos=eos,
            force=force,
            progress=show,
        )
    finally:
        done()
    _print_skipped(made.skipped)
    sidecar = made.sidecar
    if as_json:
        content = json.loads(sidecar.render())
        _print_json({"path": str(made.path), **content, "skipped": made.skipped})
        return
    print(
        f"{made.path}: {sidecar.tokens} tokens of {sidecar.documents} documents, {sidecar.dtype}, "
        f"vocab {sidecar.vocab}, tokenizer {sidecar.tokenizer}"
    )


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Text file, directory or token file; or python-stdlib.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 256,
    holdout: Annotated[float, typer.Option(help="Share of the sequences held out.")] = 0.02,
    dtype: _Dtype = None,
    pattern: _Pattern = "*",
    show: Annotated[int, typer.Option(min=0, help="Print this many training sequences.")] = 0,
    as_json: _Json = False,
) -> None:
    """Say what a job would train on: documents, tokens, sequences, the split."""
    from pydantic import ValidationError

    from hpcrun.data.corpus import inspect_corpus, is_token_file
    from hpcrun.errors import UsageError
    from hpcrun.specs.data import DataSpec

    source = {"tokens": path} if dtype or is_token_file(Path(path)) else {"text": path}
    try:
        data = DataSpec.model_validate(
            {**source, "seq_len": seq_len, "holdout": holdout, "dtype": dtype, "pattern": pattern}
        )
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, found['loc'])) or path}: {found['msg']}" for found in error.errors()]
        raise UsageError("; ".join(mistakes)) from None
    corpus = inspect_corpus(data)
    samples = _samples(corpus, show)
    _print_skipped(corpus.skipped)
    figures = _describe_corpus(path, corpus)
    if as_json:
        _print_json({**figures, "skipped": corpus.skipped, "samples": samples})
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {'unknown' if value is None else _printable(str(value))}")
    for sample in samples:
        print(f"\nsequence {sample['sequence']}:\n{sample.get('text') or sample['ids']}")


def _describe_corpus(path: str, corpus: Corpus) -> dict[str, Any]:
    return {
        "path": path,
        "kind": corpus.kind,
        "files": len(corpus.files),
        "size_bytes": corpus.size_bytes,
        "documents": corpus.documents,
        "tokens": corpus.tokens,
        "dtype": corpus.dtype,
        "vocab": corpus.vocab,
        "tokenizer": corpus.tokenizer,
        "seq_len": corpus.seq_len,
        "sequences": corpus.sequences,
        "train_sequences": corpus.train_sequences,
        "eval_sequences": corpus.eval_sequences,
        "fingerprint": corpus.fingerprint,
    }


def _samples(corpus: Corpus, count: int) -> list[dict[str, Any]]:
    """Training sequences, evenly spread: text where a token is a byte, else ids."""
    count = min(count, corpus.train_sequences)
    samples: list[dict[str, Any]] = []
    for index in range(count):
        sequence = corpus.split.train(index * corpus.train_sequences // count)
        ids = corpus.read(sequence * corpus.seq_len, corpus.seq_len)
        if corpus.tokenizer == "bytes" and max(ids) < 256:
            text = bytes(ids).decode(errors="replace").replace("\0", "␀")
            samples.append({"sequence": sequence, "text": text})
        else:
            samples.append({"sequence": sequence, "ids": ids})
    return samples


def _print_skipped(skipped: tuple[tuple[str, str], ...]) -> None:
    for path, reason in skipped[:3]:
        print(f"left out: {_printable(path)} {reason}", file=sys.stderr)
    if len(skipped) > 3:
        print(f"left out: {len(skipped) - 3} more files", file=sys.stderr)


def _printable(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2))


def _progress() -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """What shows progress on stderr, a line that stays on a terminal, a new one now and then elsewhere."""
    terminal = sys.stderr.isatty()
    every = 0.2 if terminal else 30.0
    told = time.monotonic()

    def show(seen: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= every:
            told = now
            line = f"{seen / 2**20:.0f} of {total / 2**20:.0f} MiB ({100 * seen / max(total, 1):.0f} %)"
            print(
                f"\r{line}" if terminal else line,
                end="" if terminal else "\n",
                file=unescaped_stream(sys.stderr),
                flush=True,
            )

    def done() -> None:
        if terminal:
            print("\r\033[K", end="", file=unescaped_stream(sys.stderr), flush=True)

    return show, done
