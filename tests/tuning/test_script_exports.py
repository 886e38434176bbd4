"""Settings in shells inside a script, and what is said of those that cannot be read."""

from __future__ import annotations

import random

import pytest

from hpcrun.tuning.lint.environment import EnvironmentLayer
from hpcrun.tuning.lint.lint import LintReport, lint_layers
from hpcrun.tuning.lint.script_exports import parse_script_exports

NEW = (2, 27, 5)


def exported(layer: EnvironmentLayer) -> dict[str, str | None]:
    return {one.name: one.value for one in layer.settings if one.is_exported and one.name.startswith("NCCL_")}


def of_script(text: str) -> LintReport:
    return lint_layers([parse_script_exports(text, "job.sh")], NEW)


@pytest.mark.parametrize(
    "line",
    [
        'srun bash -c "export NCCL_IB_TIMEOUT=40; python t.py"',
        "srun -N2 --ntasks-per-node=8 bash -lc 'export NCCL_IB_TIMEOUT=40 && python t.py'",
        "srun /bin/sh -euxc 'NCCL_IB_TIMEOUT=40 python t.py'",
        "srun bash -euo pipefail -c 'NCCL_IB_TIMEOUT=40 exec python t.py'",
        "srun bash --norc -c 'export NCCL_IB_TIMEOUT=40\npython t.py'",
        "srun env NCCL_IB_TIMEOUT=40 python t.py",
        "srun -n 4 /usr/bin/env -u OMP_NUM_THREADS NCCL_IB_TIMEOUT=40 python t.py",
        "env -S 'NCCL_IB_TIMEOUT=40 python t.py'",
        "timeout 600 srun env NCCL_IB_TIMEOUT=40 bash -c 'python t.py'",
        "srun numactl -N0 bash -c \"bash -c 'export NCCL_IB_TIMEOUT=40; python t.py'\"",
        "srun apptainer exec --nv img.sif bash -c 'export NCCL_IB_TIMEOUT=40; python t.py'",
        "srun apptainer exec --env NCCL_IB_TIMEOUT=40 img.sif python t.py",
        "timeout 600 mpirun -np 8 -x NCCL_IB_TIMEOUT=40 python t.py",
        "podman run -eNCCL_IB_TIMEOUT=40 img python t.py",
        "ch-run --set-env=NCCL_IB_TIMEOUT=40 img -- python t.py",
        "eval 'export NCCL_IB_TIMEOUT=40'; srun python t.py",
        'eval export NCCL_IB_TIMEOUT="40"',
        "srun bash <<'EOF'\nexport NCCL_IB_TIMEOUT=40\npython t.py\nEOF",
        "srun bash -s <<EOF\nexport NCCL_IB_TIMEOUT=40\npython t.py\nEOF",
        "cat <<EOF | srun bash\nexport NCCL_IB_TIMEOUT=40\nEOF",
        'srun bash <<< "export NCCL_IB_TIMEOUT=40; python t.py"',
        "cat > run.sh <<'EOF'\nexport NCCL_IB_TIMEOUT=40\npython t.py\nEOF\nsrun bash run.sh",
        "cat <<'EOF' > run.sh\nexport NCCL_IB_TIMEOUT=40\nEOF\nchmod +x run.sh\nsrun ./run.sh",
        "cat > env.inc <<'EOF'\nexport NCCL_IB_TIMEOUT=40\nEOF\nsource env.inc",
        "CMD='export NCCL_IB_TIMEOUT=40; python t.py'\nsrun bash -c \"$CMD\"",
        'LAUNCH="srun --export=ALL,NCCL_IB_TIMEOUT=40"\n$LAUNCH python t.py',
        'ARGS=(-np 8 -x NCCL_IB_TIMEOUT=40)\nmpirun "${ARGS[@]}" python t.py',
        "OUT=$(srun env NCCL_IB_TIMEOUT=40 python t.py)",
        "if true; then srun bash -c 'export NCCL_IB_TIMEOUT=40; python t.py'; fi # don't",
        "# it's a comment\nsrun env NCCL_IB_TIMEOUT=40 python t.py  # and don't stop here",
    ],
)
def test_settings_in_a_shell_inside_are_found(line: str) -> None:
    assert exported(parse_script_exports(f"#!/bin/bash\n{line}\n", "job.sh")) == {"NCCL_IB_TIMEOUT": "40"}
    assert of_script(f"#!/bin/bash\n{line}\n").has_errors


def test_each_is_told_with_its_line() -> None:
    text = "#!/bin/bash\nsrun bash -c '\nexport NCCL_IB_RETRY_CNT=32\nx'\nsrun env NCCL_IB_TIMEOUT=40 x\n"
    report = of_script(text)
    assert [(one.severity, one.where, one.subject) for one in report.findings] == [
        ("error", "job.sh:3", "NCCL_IB_RETRY_CNT"),
        ("error", "job.sh:5", "NCCL_IB_TIMEOUT"),
    ]
    assert report.read == ("job.sh: 4 commands read",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("srun bash run.sh", "job.sh:2: what the script `run.sh` sets is not known here"),
        ("srun ./wrap.sh python t.py", "what the script `./wrap.sh` sets is not known here"),
        ("source env.sh", "what `source env.sh` sets is not known here"),
        ('eval "$(site-env)"', "what `eval $(site-env)` sets is not known here"),
        ('srun bash -c "$CMD"', "what `bash -c $CMD` sets is not known here"),
        ('ssh n1 "NCCL_DEBUG=INFO python t.py"', "NCCL_DEBUG stands here in a form that was not looked into"),
        ("parallel 'NCCL_DEBUG={} python t.py' ::: INFO", "NCCL_DEBUG stands here in a form"),
        ('echo "NCCL_DEBUG=INFO" >> ~/.nccl.conf', "NCCL_DEBUG stands here in a form"),
        ("echo 'export NCCL_DEBUG=INFO' | bash", "NCCL_DEBUG stands here in a form"),
        ("cat > nccl.conf <<EOF\nNCCL_DEBUG=INFO\nEOF", "job.sh:3: NCCL_DEBUG stands here in a form"),
        ("python - <<EOF\nos.environ['NCCL_DEBUG'] = 'INFO'\nEOF", "job.sh:3: NCCL_DEBUG stands here in"),
        ('X="oops\nexport NCCL_DEBUG=INFO', "job.sh:2: a quote is never closed"),
        ("srun env -i python t.py", "`env -i` starts with nothing"),
    ],
)
def test_what_is_not_looked_into_is_said(line: str, words: str) -> None:
    report = of_script(f"#!/bin/bash\n{line}\n")
    assert any(words in note for note in report.notes), report.notes
    assert "not looked into" in report.read[0]


@pytest.mark.parametrize(
    "line",
    [
        'NCCL_ARGS="-b 8 -e 8G"\nNCCL_CONTAINER=tests.sqsh\nnccl_out=out\nsrun perf $NCCL_ARGS > $nccl_out',
        "NCCL_TESTS_HOME=/opt/nccl-tests\nsrun $NCCL_TESTS_HOME/build/all_reduce_perf",
        "export NCCL_TEST_BIN=/opt/perf\nsrun ${NCCL_TEST_BIN} -b 8",
        "export nccl_debug=1\nexport nccl_ib_hca=x",
        "NCCL_DIR=/opt/nccl\nexport LD_LIBRARY_PATH=$NCCL_DIR/lib:$LD_LIBRARY_PATH",
        "NCCL_IB_TIMEOUT=22\nsrun --export=ALL,NCCL_IB_TIMEOUT=$NCCL_IB_TIMEOUT python t.py",
        "NCCL_IB_TIMEOUT=22\nmpirun -x NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT} python t.py",
        "NCCL_SWEEP=(Ring Tree)\nfor algo in ${NCCL_SWEEP[@]}; do srun python t.py $algo; done",
        "declare -A nccl_names\nlocal nccl_x=1",
        "srun python t.py  # NCCL_DEBUG=INFO would be loud",
        'echo "NCCL_DEBUG=$NCCL_DEBUG"\nprintf "%s" "NCCL_DEBUG=x"\n[ "$NCCL_DEBUG" = INFO ] && true',
    ],
)
def test_names_of_the_script_s_own_are_left_alone(line: str) -> None:
    report = of_script(f"#!/bin/bash\n{line}\n")
    assert [str(one) for one in report.findings if one.severity != "note"] == []
    assert report.notes == ()


@pytest.mark.parametrize(
    "line",
    [
        "NCCL_IB_TIMEOUT=22\nsrun python t.py",
        'NCCL_IB_TIMEOUT=22\necho "$NCCL_IB_TIMEOUT"\nsrun python t.py',
        "NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}\nsrun python t.py",
        "srun bash -c 'NCCL_IB_TIMEOUT=22; python t.py'",
    ],
)
def test_a_variable_of_nccl_that_reaches_no_rank_is_an_error(line: str) -> None:
    told = [str(one) for one in of_script(f"#!/bin/bash\n{line}\n").findings if one.severity == "error"]
    assert any("without `export`" in one for one in told), told


def test_shells_without_end_are_not_followed() -> None:
    line = "python t.py"
    for _ in range(12):
        quoted = line.replace("\\", "\\\\").replace('"', '\\"')
        line = f'bash -c "{quoted}"'
    layer = parse_script_exports(line, "job.sh")
    assert any("shells inside shells" in note for note in layer.notes)
    loops = "cat > a <<E\n" + "source a; bash a\n" * 50 + "E\nsource a; bash a; CMD='$CMD'; $CMD\n"
    assert "what `source a` sets is not known here" in str(parse_script_exports(loops, "job.sh").notes)


def test_no_text_breaks_the_reader() -> None:
    dice = random.Random(14)
    pieces = (
        "srun env bash -c -S -u <<< <<E E > f source . f eval export X=1 X=( ) $X ${X[@]} ' \" \n ; | & \\"
    )
    words = [*pieces.replace("\\n", "\n").split(" "), "NCCL_DEBUG=INFO", "\n", "\n", "#", "-x", "for"]
    for _ in range(3000):
        text = " ".join(dice.choices(words, k=dice.randint(1, 14)))
        assert parse_script_exports(text, "job.sh").read is not None, text
