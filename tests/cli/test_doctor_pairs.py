"""`hpcrun doctor pairs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpcrun.cli.doctor import app
from hpcrun.errors import UsageError

OUTPUT = Path(__file__).parents[1] / "data" / "tuning" / "nccl-tests" / "all-reduce-2.17.txt"


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["pairs", *arguments])
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def output(folder: Path, first: str, second: str, busbw: str) -> str:
    text = OUTPUT.read_text().replace("n01 ", f"{first} ").replace("n02 ", f"{second} ")
    path = folder / f"{first}+{second}.txt"
    path.write_text(text.replace("334.06", busbw))
    return str(path)


def test_from_the_first_pairs_to_the_name_of_the_node(tmp_path: Path) -> None:
    lines = run("n[01-04]").stdout.splitlines()
    assert [line.rpartition("> ")[2] for line in lines[1:3]] == ["n01+n02.txt &", "n03+n04.txt &"]
    assert lines[-1].endswith("links OUT.json n01+n02:0-1 n03+n04:2-3")
    files = [output(tmp_path, "n01", "n02", "334.06"), output(tmp_path, "n03", "n04", "120.00")]
    assert json.loads(run("n[01-04]", *files, "--json").stdout)["next"] == [["n03", "n01"], ["n04", "n02"]]
    files += [output(tmp_path, "n03", "n01", "331.00"), output(tmp_path, "n04", "n02", "118.00")]
    told = run("n[01-04]", *files, code=1).stdout
    assert told.startswith(
        "error    pair  n04: is slow: 120 GB/s with n03, 118 GB/s with n02; those reach 26"
    )
    assert "try next" not in told


def test_a_limit_of_one_s_own(tmp_path: Path) -> None:
    files = [output(tmp_path, "n01", "n02", "334.06")]
    assert "nothing to compare" in run("n[01-02]", *files).stdout
    assert run("n[01-02]", *files, "--at-least", "300").stdout == "all 2 nodes are as fast as the others\n"
    assert "unknown" in run("n[01-02]", *files, "--at-least", "400").stdout


def test_pairs_of_adapters(tmp_path: Path) -> None:
    told = run("n[01-02]", "--hca", "mlx5_[0-1]").stdout.splitlines()
    assert told[1].endswith("--nodelist=n02 ib_write_bw -F -D 5 -s 1048576 -q 4 --report_gbits -p 18515"
                            " -d mlx5_0 & sleep 2")  # fmt: skip
    assert told[2].endswith("-p 18515 -d mlx5_0 n02 > 'n01:mlx5_0+n02:mlx5_0.txt' &")
    assert "-p 18516 -d mlx5_1 n02" in told[4]
    head = "#bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]"
    files = []
    for adapter, rate in (("mlx5_0", "391.2"), ("mlx5_1", "390.0")):
        files.append(tmp_path / f"n01:{adapter}+n02:{adapter}.txt")
        files[-1].write_text(f"{head}\n 1048576 5000 392.0 {rate} 0.04\n")
    words = ["n[01-02]", "--hca", "mlx5_[0-1]", "--at-least", "45", *map(str, files)]
    assert run(*words).stdout == "all 4 adapters are as fast as the others\n"
    with pytest.raises(UsageError, match="--hca goes with pairs"):
        CliRunner().invoke(app, ["--hca", "mlx5_0"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "name the nodes"),
        (["n1"], "it takes two nodes"),
        (["n[1-2]", "none.txt"], "none.txt: cannot be read"),
        (["n[1-2]", str(OUTPUT)], "n01 and n02: are no pair of n1, n2"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        run(*words)
