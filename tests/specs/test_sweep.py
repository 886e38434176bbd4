"""Sweeps: which elements a section stands for, the job of each, their mistakes, the way to disk and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import SpecError, UsageError
from hpcrun.specs.load import ResolvedJob, load_job, parse_job, render_job
from hpcrun.specs.resources import SweepSpec
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.sweep import expand_sweep, read_sweep, write_sweep

BASE = "model: demo\ndata: {text: /corpus}\n"


def job(sweep: str, base: str = BASE, *overrides: str) -> ResolvedJob:
    return parse_job(f"{base}sweep: {sweep}\n", "job.yaml", overrides)


def problems(sweep: str, base: str = BASE, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        job(sweep, base, *overrides)
    return [str(problem) for problem in caught.value.problems]


def test_every_combination_of_grid_rows_and_entries_with_the_last_key_of_the_grid_fastest() -> None:
    sweep = SweepSpec(
        grid={"a": [1, 2], "b": [3, 4]}, zip={"c": [5, 6], "d": [7, 8]}, list=[{"e": 9}, {}, {"f": 10}]
    )
    found = expand_sweep(sweep)
    assert len(found) == 2 * 2 * 2 * 3
    assert [(one["a"], one["b"]) for one in found[::6]] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert [(one["c"], one["d"]) for one in found[::3]] == [(5, 7), (6, 8)] * 4
    assert [(one.get("e"), one.get("f")) for one in found[:3]] == [(9, None), (None, None), (None, 10)]


@pytest.mark.parametrize(
    ("sweep", "count"),
    [
        ({"grid": {"a": [1, 2, 3]}}, 3),
        ({"zip": {"a": [1, 2], "b": [1, 2]}}, 2),
        ({"list": [{"a": 1}, {"a": 2}]}, 2),
        ({"list": [{}]}, 1),
    ],
)
def test_a_part_that_is_absent_takes_nothing_away(sweep: dict[str, Any], count: int) -> None:
    assert len(expand_sweep(SweepSpec(**sweep))) == count


def test_each_element_is_a_job_of_its_own() -> None:
    found = job("{grid: {train.lr: [1e-3, 2e-3], model: [tiny, demo]}, list: [{env.A: x}], throttle: 2}")
    specs = [element.spec for element in found.elements]
    assert [(spec.train.lr, spec.model and spec.model.hidden, spec.env) for spec in specs] == [
        (1e-3, 64, {"A": "x"}),
        (1e-3, 128, {"A": "x"}),
        (2e-3, 64, {"A": "x"}),
        (2e-3, 128, {"A": "x"}),
    ]
    assert [spec.sweep for spec in specs] == [None] * 4
    assert found.elements[1].overrides == {"train.lr": 1e-3, "model": "demo", "env.A": "x"}
    assert found.elements[3].training_plan.gbs == 1
    assert found.spec.sweep is not None
    assert found.spec.sweep.throttle == 2
    assert found.spec.model_copy(update={"sweep": None}) == specs[0]
    assert found.plan == found.elements[0].plan
    assert parse_job(render_job(specs[2]), "spec.yaml").spec == specs[2]


def test_a_job_without_a_sweep_has_no_elements() -> None:
    assert parse_job(BASE, "job.yaml").elements == ()
    assert parse_job(f"{BASE}sweep:\n", "job.yaml").elements == ()


def test_the_layout_of_each_element_follows_from_its_own_values() -> None:
    found = job("{zip: {parallel.pp: [2, 1], parallel.dp_shard: [1, 2], train.gbs: [8, 6]}}")
    assert [(e.spec.parallel.zero, e.spec.parallel.microbatches) for e in found.elements] == [(0, 8), (3, 3)]


def test_the_job_may_be_whole_with_its_sweep_alone() -> None:
    found = job("{grid: {model: [demo, tiny]}, list: [{data.text: /a}, {data: {text: /b}}]}", "name: n\n")
    assert [e.spec.data and e.spec.data.text for e in found.elements] == ["/a", "/b"] * 2
    found = job("{list: [{command: [a]}, {command: [b, c]}]}", "name: n\n")
    assert [e.spec.command for e in found.elements] == [["a"], ["b", "c"]]


def test_a_preset_and_a_size_in_it_can_both_be_swept() -> None:
    found = job("{grid: {model.layers: [2, 6], model: [demo, tiny]}}")
    models = [element.spec.model for element in found.elements]
    assert [(model.layers, model.hidden) for model in models if model] == [
        (2, 128),
        (2, 64),
        (6, 128),
        (6, 64),
    ]


@pytest.mark.parametrize(
    ("sweep", "base"),
    [
        ("{grid: {train.gbs: [4, 8], parallel.schedule: [1f1b, gpipe]}}", f"{BASE}parallel: {{pp: 2}}\n"),
        ("{list: [{model.layers: 2}, {train.grad_clip: null}, {}], throttle: 1}", BASE),
        ("{zip: {model: [tiny, demo], data.text: [a, b]}}", "data: {seq_len: 64}\ntrain:\nenv: {A: b}\n"),
        ("{grid: {command: [[a], [b]]}}", "resources: {nodes: 2}\n"),
    ],
)
def test_a_resolved_sweep_reads_back_to_the_same_elements(sweep: str, base: str) -> None:
    found = job(sweep, base, "train.lr=", "train.lr=2e-4") if "command" not in sweep else job(sweep, base)
    again = parse_job(found.render(), "spec.yaml")
    assert again == found
    assert len(again.elements) > 1
    assert again.render() == found.render()
    assert "seed: 0" in found.render(), "defaults are written down"


def test_paths_in_a_sweep_are_relative_to_the_file_and_those_of_an_override_to_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs/job.yaml"
    file.write_text(
        "model: demo\nsweep: {grid: {data.text: [a, ~/b, python-stdlib]}, list: [{data: {text: c}}]}"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")

    def texts(*overrides: str) -> list[str | None]:
        elements = load_job(file, overrides).elements
        return [element.spec.data.text for element in elements if element.spec.data]

    assert texts("sweep.list=[{}]") == [f"{tmp_path}/jobs/a", "/home/me/b", "python-stdlib"]
    assert texts("sweep.grid=null", "sweep.grid={}") == [f"{tmp_path}/jobs/c"]
    assert texts("sweep.list=[{}]", "sweep.grid.data.text=[d]") == [f"{tmp_path}/d"]


def test_a_sweep_can_be_given_on_the_command_line() -> None:
    found = parse_job(
        BASE, "job.yaml", ["sweep.grid.train.lr=[1e-3, 2e-3]", "sweep.zip.train.seed=[1, 2, 3]"]
    )
    assert len(found.elements) == 6


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("{}", "job.yaml:3 sweep: has nothing to try; give grid, zip or list"),
        ("{throttle: 2}", "job.yaml:3 sweep: has nothing to try; give grid, zip or list"),
        ("3", "job.yaml:3 sweep: must be a mapping of keys to values, not 3 (values to try"),
        (
            "{gird: {train.lr: [1]}}",
            "job.yaml:3 sweep.gird: unknown key; did you mean grid? allowed: grid, zip,",
        ),
        ("{train.lr: [1]}", "job.yaml:3 sweep.train.lr: unknown key; allowed: grid, zip, list, throttle"),
        (
            "{grid: {train.lr: 3}}",
            "job.yaml:3 sweep.grid.train.lr: must be a list, not 3 (dotted keys with lists",
        ),
        (
            "{grid: {train: {lr: [1]}}}",
            "sweep.grid.train: must be a list, not a mapping (dotted keys with lists",
        ),
        ("{grid: {train.lr: []}}", "sweep.grid.train.lr: must have at least 1 items, not 0"),
        ("{list: [train.lr]}", 'sweep.list.0: must be a mapping of keys to values, not "train.lr"'),
        ("{grid: {train.lr: [1]}, throttle: 0}", "sweep.throttle: must be at least 1, not 0"),
        (
            "{zip: {train.lr: [1, 2], train.seed: [1]}}",
            "sweep.zip: its lists must be equally long, found train.lr 2, train.seed 1; for all combinations",
        ),
        (
            "{grid: {train.lr: [1]}, zip: {train.lr: [1]}}",
            "sweep.zip.train.lr: train.lr stands in grid and in zip; leave it in one of them",
        ),
        (
            "{grid: {train.lr: [1]}, list: [{}, {train.lr: 1}]}",
            "sweep.list: train.lr stands in grid and in list; leave it in one of them",
        ),
        (
            "{grid: {name: [a]}}",
            "sweep.grid.name: cannot be swept; name belongs to the whole sweep, give it once",
        ),
        ("{list: [{secrets.A: b}]}", "sweep.list.0.secrets.A: cannot be swept; secrets belongs to the whole"),
        ("{zip: {cluster: [b]}}", "sweep.zip.cluster: cannot be swept; cluster belongs to the whole sweep"),
        ("{grid: {sweep.throttle: [1]}}", "sweep.grid.sweep.throttle: cannot be swept; sweep belongs to"),
    ],
)
def test_a_section_that_cannot_be(sweep: str, message: str) -> None:
    (line,) = problems(sweep)
    assert message in line


def test_more_elements_than_anybody_means_are_refused_before_they_are_made() -> None:
    values = str(list(range(100)))
    (line,) = problems(f"{{grid: {{train.seed: {values}, train.steps: {values}, train.mbs: {values}}}}}")
    assert line.startswith(
        "job.yaml:3 sweep: stands for 1000000 elements; at most 10000 are taken, use fewer"
    )


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (
            "{grid: {train.lrr: [1, 2]}}",
            "job.yaml:3 sweep train.lrr: element 0 and 1 more: unknown key; did you mean lr?",
        ),
        (
            "{grid: {train.seed: [1, 2], train.lr: [1, -1, 2]}}",
            "job.yaml:3 sweep train.lr: element 1 and 1 more: must be above 0.0, not -1 (peak learning rate)",
        ),
        (
            "{grid: {train.steps.x: [1]}}",
            "job.yaml:3 sweep train.steps: element 0: must be a whole number, not a mapping",
        ),
        (
            "{grid: {model: [demo, dmo]}}",
            'job.yaml:3 sweep model: element 1: "dmo" is not known; did you mean demo?',
        ),
        (
            "{grid: {data.tokens: [/a, /b]}}",
            "job.yaml:3 sweep data: element 0 and 1 more: give exactly one of text and tokens, found both",
        ),
        (
            "{grid: {train.mbs: [1, 3], train.seed: [1, 2]}, list: [{train.gbs: 4}]}",
            "job.yaml:3 sweep train.gbs: element 2 and 1 more: 4 is not a multiple of mbs 3 × dp 1 = 3",
        ),
    ],
)
def test_the_mistakes_of_an_element_are_told_once_with_its_number(sweep: str, message: str) -> None:
    (line,) = problems(sweep)
    assert line.startswith(message)


def test_what_does_not_go_together_in_an_element_names_its_values() -> None:
    (line,) = problems("{grid: {train.mbs: [1, 3], train.seed: [7]}}", f"{BASE}train: {{gbs: 4}}\n")
    assert line == (
        "job.yaml:4 sweep: element 1 (train.mbs=3, train.seed=7): train.gbs: 4 is not a multiple of mbs 3"
        " × dp 1 = 3; the nearest is 3"
    )


def test_the_line_of_a_mistake_is_that_of_the_value() -> None:
    lines = [
        "sweep:",
        "  grid:",
        "    train.lr:",
        "      - 1e-3",
        "      - -1",
        "  list:",
        "    - train.seed: x",
    ]
    with pytest.raises(SpecError) as caught:
        parse_job(BASE + "\n".join(lines), "job.yaml")
    assert [str(problem).split(": ")[0] for problem in caught.value.problems] == [
        "job.yaml:7 sweep train.lr",
        "job.yaml:9 sweep train.seed",
    ]


def test_a_mistake_of_the_job_itself_is_told_as_without_a_sweep() -> None:
    base = f"{BASE}train: {{stps: 3, gbs: 0}}\n"
    plain = problems("", base)
    assert problems("{grid: {train.lr: [1, 2]}}", base) == plain
    assert len(plain) == 2
    assert problems("{grid: {train.lr: [1, 2]}}", "model: demo\n") == problems("", "model: demo\n")


def test_a_broken_section_hides_no_other_mistake_and_makes_none() -> None:
    found = problems("{gird: {model: [demo]}}", "data: {txt: a}\n", "train.lr=x")
    assert [line.split(": ")[0] for line in found] == [
        "command line train.lr",
        "job.yaml:1 data.txt",
        "job.yaml:2 sweep.gird",
    ]


def test_a_bad_override_beside_a_sound_sweep_is_told() -> None:
    assert [line.split(":")[0] for line in problems("{grid: {train.lr: [1]}}", BASE, "nonsense")] == [
        'command line "nonsense"'
    ]


def test_of_many_mistakes_a_few_are_told() -> None:
    found = problems(f"{{grid: {{train.lr: {[-n for n in range(1, 101)]}, train.seed: [1, 2]}}}}")
    assert len(found) == 6
    assert "job.yaml:3 sweep: 95 more mistakes in its elements, not shown" in found


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("{grid: {resources.time: [1h, 2h, 3h]}}", 'resources.time: element 1 has "2h", element 0 "1h"'),
        ("{grid: {modules: [[a], [b]]}}", "modules: element 1 has a list, element 0 a list"),
        ("{list: [{}, {container.image: a}]}", 'container.image: element 1 has "a", element 0 null'),
        ("{list: [{}, {python: /a}]}", 'python: element 1 has "/a", element 0 null'),
        ("{list: [{retry.crash: 1}, {retry.crash: 2}]}", "retry.crash: element 1 has 2, element 0 1"),
        ("{grid: {parallel.tp: [1, 2]}}", "ranks: element 1 has 2, element 0 1"),
    ],
)
def test_elements_ask_for_the_same(sweep: str, message: str) -> None:
    tail = "; a sweep is one batch job, its elements must ask for the same"
    assert f"job.yaml:3 sweep: {message}{tail}" in problems(sweep)


def test_elements_are_all_commands_or_none() -> None:
    (line,) = problems("{list: [{command: [a]}, {model: demo, data: {text: /a}}]}", "name: n\n")
    assert line.startswith(
        "job.yaml:2 sweep: command: some elements have one, some have none; a sweep is one"
    )


def test_a_mistake_that_the_machine_shows_is_told_at_the_sweep() -> None:
    found = job("{grid: {data.text: [/a, /b]}}")
    assert str(found.elements[1].mistake("data.text", "no such file")) == "job.yaml:3 data.text: no such file"
    assert str(found.elements[1].mistake("model", "no")) == "job.yaml:1 model: no"


def test_the_record_of_a_sweep_reads_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    elements: list[dict[str, Any]] = [{"train.lr": 1e-3, "env.A": "é"}, {"model": {"layers": 2}}, {}]
    write_sweep(run, elements)
    assert read_sweep(run) == elements


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a sweep"),
        ("{", "is damaged: "),
        ("{}", "is damaged: not a list"),
        ("[1]", "is damaged: not a"),
    ],
)
def test_a_record_that_is_none_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_sweep(RunDir(tmp_path))


@pytest.mark.process
def test_reading_the_record_loads_no_pydantic(tmp_path: Path) -> None:
    write_sweep(RunDir(tmp_path), [{"a": 1}])
    code = (
        "import sys, json, pathlib; from hpcrun.specs.sweep import read_sweep;"
        "from hpcrun.specs.rundir import RunDir; found = read_sweep(RunDir(pathlib.Path(sys.argv[1])));"
        "print(json.dumps([found, 'pydantic' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [[{"a": 1}], False]
