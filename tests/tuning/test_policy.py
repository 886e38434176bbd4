"""The measured policy: what raw times support for a job, and what they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import SpecError, UsageError
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.settings import CommSetting
from hpcrun.tuning.advice import AdviceContext, advise_settings
from hpcrun.tuning.fabrics import load_fabric_kinds
from hpcrun.tuning.job_settings import find_corrupting_settings
from hpcrun.tuning.policy.entry import (
    BenchmarkRun,
    StatedConditions,
    append_policy_row,
    insert_policy_row,
    make_policy_row,
)
from hpcrun.tuning.policy.nccl_tests import parse_nccl_tests
from hpcrun.tuning.policy.policy import (
    PolicyRequest,
    PolicyRowSpec,
    choose_measured_settings,
    load_policy,
    measured_gains,
    parse_policy,
    why_inconclusive,
)
from hpcrun.tuning.registry.nccl_grammar import forces_ll128

OUTPUTS = Path(__file__).parents[1] / "data" / "tuning" / "nccl-tests"
QPS = "NCCL_IB_QPS_PER_CONNECTION"
NOISE = (0.99, 1.0, 1.01, 0.995, 1.005, 1.003, 1.002, 0.998)
JOB = PolicyRequest((2, 28, 9), 4, 8)


def call(speedup: float, size_bytes: int = 2**28, pairs: int = 8, **more: Any) -> dict[str, Any]:
    without = [1000.0 * one for one in NOISE[:pairs]]
    return {
        "collective": "all_reduce",
        "size_bytes": size_bytes,
        "with_us": [one / speedup for one in reversed(without)],
        "without_us": without,
        "checked": True,
        **more,
    }


def row(*measured: dict[str, Any], **changes: Any) -> PolicyRowSpec:
    content: dict[str, Any] = {
        "set": {QPS: "4"},
        "nccl": "2.28.7",
        "nodes": [4, 4],
        "ranks_per_node": 8,
        "measured": list(measured or [call(1.2)]),
        "when": "2026-11-30",
        "by": "anna",
    }
    return PolicyRowSpec.model_validate(content | changes)


def chosen(*rows: PolicyRowSpec, demand: PolicyRequest = JOB) -> tuple[dict[str, str], str]:
    settings, notes = choose_measured_settings(rows, demand, "policy.yaml")
    return {one.name: one.value for one in settings}, "\n".join(notes)


def test_a_measured_gain_becomes_a_setting_with_its_figures_and_its_row() -> None:
    settings, notes = choose_measured_settings([row(call(1.2), call(1.0, 2**20))], JOB, "policy.yaml")
    assert notes == ()
    assert [(one.name, one.value, one.needs) for one in settings] == [(QPS, "4", "NCCL 2.28")]
    assert settings[0].reason.startswith("1.2 times as fast in all_reduce of 256 MiB (95 %: 1.19 to 1.2")
    assert settings[0].reason.endswith("8 pairs); none of 2 is slower")
    assert settings[0].source == "policy.yaml, row 1: 2026-11-30 by anna, 4 nodes x 8 ranks, NCCL 2.28.7"


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        ([call(1.04)], "at most 1.04 times as fast in all_reduce of 256 MiB (95 %: 1.03 to 1.0"),
        ([call(1.3), call(0.9, 8)], "0.9 times as fast in all_reduce of 8 B (95 %: 0.89"),
        ([call(1.3, pairs=5)], "5 pairs of all_reduce of 256 MiB; it takes 6"),
        ([call(1.3, with_us=[9e3, 1.0] * 4)], "at most"),
    ],
)
def test_times_that_support_nothing_are_told_with_their_figures(
    measured: list[dict[str, Any]], why: str
) -> None:
    settings, notes = chosen(row(*measured))
    assert settings == {}
    assert notes.startswith(f"{QPS}=4 is not set (policy.yaml, row 1): {why}")


def test_a_loss_within_three_in_a_hundred_at_a_size_does_not_forbid_a_gain() -> None:
    assert chosen(row(call(1.2), call(0.985, 1024)))[0] == {QPS: "4"}


@pytest.mark.parametrize(
    ("demand", "why"),
    [
        (PolicyRequest(None, 4, 8), "which NCCL the job loads is not known, and it was measured with 2.28"),
        (PolicyRequest((2, 27, 7), 4, 8), "it was measured with NCCL 2.28, this is 2.27.7"),
        (PolicyRequest((2, 28, 9), 5, 8), "it was measured on 4 nodes, the job has 5"),
        (PolicyRequest((2, 28, 9), 4, 4), "it was measured with 8 ranks a node, the job has 4"),
    ],
)
def test_what_was_measured_elsewhere_is_not_used(demand: PolicyRequest, why: str) -> None:
    settings, notes = chosen(row(), demand=demand)
    assert settings == {}
    assert notes == f"{QPS}=4 is not set (policy.yaml, row 1): {why}"


def test_between_the_measured_numbers_of_nodes_a_row_holds() -> None:
    wide = row(call(1.2, nodes=2), call(1.2, nodes=16), nodes=[2, 16])
    assert [chosen(wide, demand=PolicyRequest((2, 28), nodes, 8))[0] for nodes in (2, 9, 16)] == [
        {QPS: "4"}
    ] * 3
    assert chosen(wide, demand=PolicyRequest((2, 28), 17, 8))[0] == {}


def test_lint_has_the_last_word() -> None:
    settings, notes = chosen(row(set={"NCCL_IB_RETRY_CNT": "15"}))
    assert settings == {}
    assert "out of range" in notes
    assert (
        "did you mean NCCL_IB_QPS_PER_CONNECTION?" in chosen(row(set={"NCCL_IB_QPS_PER_CONNECTIONS": "4"}))[1]
    )


def test_results_that_nobody_checked_support_nothing() -> None:
    settings, notes = chosen(row(call(1.3), call(1.3, 2**20, checked=False)))
    assert settings == {}
    assert notes == (
        f"{QPS}=4 is not set (policy.yaml, row 1): results were not checked for all_reduce of 1 MiB;"
        " run nccl-tests with -c 1"
    )


@pytest.mark.parametrize("value", ["LL128", "ll128,simple", "^LL", "allreduce:LL128", "^LL;reduce:ll"])
def test_ll128_is_never_forced_however_well_it_was_measured(value: str) -> None:
    settings, notes = chosen(row(set={"NCCL_PROTO": value}))
    assert settings == {}
    assert "it would turn LL128 on where NCCL has it off" in notes
    measured = CommSetting("NCCL_PROTO", value, "1.3 times as fast", "policy.yaml, row 1")
    advised = advise_settings(AdviceContext(ClusterSpec(name="c"), 4, measured=(measured,), nccl=JOB.nccl))
    assert advised.environment() == {}
    assert "is left out: it would turn LL128 on" in "\n".join(advised.notes)


@pytest.mark.parametrize("value", ["^LL128", "LL,Simple", "Simple", "allreduce:^LL128"])
def test_a_choice_without_ll128_is_set(value: str) -> None:
    assert chosen(row(set={"NCCL_PROTO": value}))[0] == {"NCCL_PROTO": value}


def test_no_fabric_of_ours_forces_ll128() -> None:
    given = [(kind.name, one) for kind in load_fabric_kinds().values() for one in kind.settings]
    assert not [name for name, one in given if forces_ll128(one.name, one.value, None)]


def test_ll128_that_somebody_else_forces_is_told_unless_the_platform_asks_for_it() -> None:
    told = find_corrupting_settings({"NCCL_PROTO": "LL128"}, None, "env of the job")
    assert told[0].startswith(
        "NCCL_PROTO=LL128 stands, as env of the job has it: it turns LL128 on also where NCCL has it off, "
    )
    asked = {"NCCL_PROTO": "Simple,LL128", "NCCL_FASTRAK_NUM_FLOWS": "2"}
    assert (
        find_corrupting_settings(asked, None, "x")
        == find_corrupting_settings({"NCCL_PROTO": "^LL128"}, None, "x")
        == []
    )


def test_of_several_rows_the_nearest_in_nodes_counts() -> None:
    near = row(call(1.2, nodes=4), call(1.2, nodes=8), nodes=[4, 8])
    far = row(call(1.2, nodes=2), call(1.2, nodes=16), nodes=[2, 16], set={QPS: "8"})
    settings, notes = chosen(far, near)
    assert settings == {QPS: "4"}
    assert notes.startswith(f"{QPS}=8 is not set (policy.yaml, row 1): policy.yaml, row 2: ")
    assert notes.endswith("is nearer in nodes")
    assert chosen(far, near, demand=PolicyRequest((2, 28), 2, 8))[0] == {QPS: "8"}


def test_rows_that_contradict_each_other_set_nothing() -> None:
    settings, notes = chosen(row(), row(set={QPS: "8"}))
    assert settings == {}
    assert notes == f"{QPS} is not set: rows that are equally near support 4 and 8; measure them together"
    settings, notes = chosen(row(), row(call(0.8), when="2026-12-01"))
    assert settings == {}
    assert "one row supports it, another says 0.8 times as fast" in notes
    assert chosen(row(), row(call(1.1)))[0] == {QPS: "4"}


def test_what_was_measured_together_is_set_together() -> None:
    both = row(set={QPS: "4", "NCCL_IB_SPLIT_DATA_ON_QPS": "1"})
    assert len(chosen(both)[0]) == 2
    settings, notes = chosen(both, demand=PolicyRequest((2, 28), 4, 8, {"NCCL_IB_SPLIT_DATA_ON_QPS": "0"}))
    assert settings == {}
    assert notes.endswith("NCCL_IB_SPLIT_DATA_ON_QPS stands as 0, and they were measured together")
    assert len(chosen(both, demand=PolicyRequest((2, 28), 4, 8, {QPS: "4"}))[0]) == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nodes: [4, 8]", "has to say its own `nodes`"),
        ("nodes: [8, 4]", r"write \[least, most\]"),
        ("nccl: new", "nccl"),
        ("gain: 1.2", "gain"),
        ("with_us: [1.0]", "with_us has 1 times and without_us 2"),
        ("with_us: [1.0, 0.0]", "a time must be above 0"),
    ],
)
def test_a_policy_s_mistakes_are_told_with_their_line(line: str, why: str) -> None:
    key = line.partition(":")[0]
    fields = {
        "set": '{NCCL_X: "1"}', "nccl": '"2.28"', "nodes": "[4, 4]", "ranks_per_node": "8",
        "when": '"2026-11-30"', "by": "anna",
    }  # fmt: skip
    times = {"with_us": "[1.0, 1.0]", "without_us": "[2.0, 2.0]"}
    (times if key in times else fields)[key] = line.partition(": ")[2]
    text = "rows:\n  - " + "\n    ".join(f"{name}: {value}" for name, value in fields.items())
    text += "\n    measured:\n      - {collective: a, size_bytes: 8, "
    text += ", ".join(f"{name}: {value}" for name, value in times.items()) + "}\n"
    with pytest.raises(SpecError, match=why) as caught:
        parse_policy(text, "p.yaml")
    assert str(caught.value).startswith("p.yaml:")


def outputs(speedup: float, count: int = 6, name: str = "all-reduce-2.17") -> list[BenchmarkRun]:
    text = (OUTPUTS / f"{name}.txt").read_text(encoding="utf-8")
    time = "1406.2" if "1406.2" in text else "1511.0"
    return [
        BenchmarkRun(
            f"run{at}-{speedup}.txt",
            parse_nccl_tests(text.replace(time, f"{float(time) / speedup * NOISE[at]:.1f}")),
        )
        for at in range(count)
    ]


STATED = StatedConditions({QPS: "4"}, "2026-11-30", "anna")


def test_outputs_of_nccl_tests_become_a_row() -> None:
    found = make_policy_row(outputs(1.3), outputs(1.0), STATED)
    assert (found.nccl, found.nodes, found.ranks_per_node) == ("2.28.9", [2, 2], 4)
    assert len(found.measured) == 6
    best = max(measured_gains(found), key=lambda one: one.low)
    assert (best.call.size_bytes, best.call.in_place, best.pairs) == (2**28, False, 6)
    assert why_inconclusive(found) == ""
    alike = make_policy_row(outputs(1.001), outputs(1.0), STATED)
    assert why_inconclusive(alike).startswith("at most 1 times as fast")


def _changed(runs: list[BenchmarkRun], **changes: Any) -> list[BenchmarkRun]:
    return [BenchmarkRun(runs[0].name, replace(runs[0].found, **changes)), *runs[1:]]


_COPY = BenchmarkRun("copy.txt", outputs(1.3)[0].found)


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (outputs(1.3), outputs(1.0)[:5], "6 outputs with the settings and 5 without"),
        ([*outputs(1.3)[:5], outputs(1.3)[0]], outputs(1.0), "12 outputs hold 11 different runs"),
        (outputs(1.3), [_COPY] * 6, "copy.txt: has the very times of run0"),
        (outputs(1.3)[:5], outputs(1.0)[:5], "5 pairs of all_reduce, 1048576 bytes, on 2 nodes: it takes 6"),
        (_changed(outputs(1.3), times_us={}), outputs(1.0), "run0-1.3.txt: holds no times"),
        (outputs(1.3), _changed(outputs(1.0), is_wrong=True), "run0-1.0.txt: has wrong results"),
        (outputs(1.3), _changed(outputs(1.0), nccl=(2, 27, 5)), "NCCL: 2.28.9 by run0-1.3.txt, 2.27.5 by"),
        (outputs(1.3), _changed(outputs(1.0), nodes=("n01",), ranks=4), "nodes: 2 by run0-1.3.txt, 1 by"),
        (outputs(1.3), _changed(outputs(1.0), env={QPS: "4"}), "ran with NCCL_IB_QPS_PER_CONNECTION=4; give"),
        (_changed(outputs(1.3), env={QPS: "1"}), outputs(1.0), "NCCL_IB_QPS_PER_CONNECTION=1, not 4"),
        (
            outputs(1.3),
            _changed(outputs(1.0), times_us=dict(list(outputs(1.0)[0].found.times_us.items())[2:])),
            "run0-1.0.txt: has no 1048576 bytes, run0-1.3.txt has",
        ),
    ],
)  # fmt: skip
def test_outputs_that_cannot_be_paired_are_refused(
    ours: list[BenchmarkRun], theirs: list[BenchmarkRun], why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make_policy_row(ours, theirs, STATED)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_old_outputs_do_not_tell_is_said() -> None:
    old, other = (outputs(speedup, name="alltoall-2.13") for speedup in (1.0, 1.1))
    with pytest.raises(UsageError, match="does not tell its collective; say it with --collective"):
        make_policy_row(old, other, STATED)
    stated = StatedConditions({QPS: "4"}, "2026-11-30", "anna", collective="alltoall")
    assert {one.collective for one in make_policy_row(old, other, stated).measured} == {"alltoall"}


@pytest.mark.parametrize(
    ("found", "put"),
    [
        ("      0  ", "    N/A  "),  # out of place alone
        ("validation: 1", "validation: 0"),
        (" 190.89  334.06      0", " 190.89  334.06      -"),
        (" 190.89  334.06      0", " 190.89  334.06    nan"),
    ],
)
def test_a_row_of_outputs_that_were_not_all_checked_supports_nothing(found: str, put: str) -> None:
    runs = outputs(1.3)
    text = (OUTPUTS / "all-reduce-2.17.txt").read_text(encoding="utf-8").replace(found, put)
    odd = BenchmarkRun("odd.txt", parse_nccl_tests(text.replace("1406.2", "1080.0")))
    made = make_policy_row([*runs[:5], odd], outputs(1.0), STATED)
    assert why_inconclusive(made).startswith("results were not checked for all_reduce of ")
    assert why_inconclusive(make_policy_row(runs, outputs(1.0), STATED)) == ""


@pytest.mark.parametrize("said", ["all_gather", "reduce", "AllToAll"])
def test_another_collective_than_the_outputs_tell_is_refused(said: str) -> None:
    stated = StatedConditions({QPS: "4"}, "2026-11-30", "anna", collective=said)
    with pytest.raises(UsageError, match=f"run0-1.3.txt: ran all_reduce, and --collective says {said}"):
        make_policy_row(outputs(1.3), outputs(1.0), stated)
    for same in ("all_reduce", "AllReduce", "all-reduce"):
        right = StatedConditions({QPS: "4"}, "2026-11-30", "anna", collective=same)
        assert {one.collective for one in make_policy_row(outputs(1.3), outputs(1.0), right).measured} == {
            "all_reduce"
        }


def test_a_row_is_added_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    first, second = row(), make_policy_row(outputs(1.3), outputs(1.0), STATED)
    assert append_policy_row(path, first) == (first,)
    path.write_text("# by hand\n" + path.read_text())
    assert append_policy_row(path, second) == (first, second)
    assert path.read_text().startswith("# by hand\nrows:\n  - set: ")
    assert load_policy(path) == (first, second)


@pytest.mark.parametrize("before", ["", "# ours\n", "# ours\nrows: []\n", "rows:\n"])
def test_a_policy_without_rows_gets_its_first(before: str) -> None:
    text = insert_policy_row(before, row(), "p.yaml")
    assert parse_policy(text, "p.yaml") == (row(),)
    assert text.startswith("# ours\n") is before.startswith("# ours")


def test_a_file_whose_rows_are_not_its_end_is_left_alone() -> None:
    flow = 'rows: [{set: {NCCL_X: "1"}, nccl: "2.28", nodes: [4, 4], ranks_per_node: 8, when: d, by: a,' \
        " measured: [{collective: a, size_bytes: 8, with_us: [1.0], without_us: [1.0]}]}]\n"  # fmt: skip
    with pytest.raises(UsageError, match=r"p\.yaml"):
        insert_policy_row(flow, row(), "p.yaml")


def test_runs_on_several_numbers_of_nodes_become_one_row() -> None:
    four = [_changed([run], nodes=("n01", "n02", "n03", "n04"), ranks=16)[0] for run in outputs(1.1)]
    plain = [_changed([run], nodes=("n01", "n02", "n03", "n04"), ranks=16)[0] for run in outputs(0.9)]
    found = make_policy_row([*outputs(1.3), *four], [*outputs(1.0), *plain], STATED)
    assert found.nodes == [2, 4]
    assert {(one.nodes, len(one.with_us)) for one in found.measured} == {(2, 6), (4, 6)}
    assert chosen(found, demand=PolicyRequest((2, 28, 9), 3, 4))[0] == {QPS: "4"}


def test_a_name_that_is_no_variable_is_refused() -> None:
    with pytest.raises(UsageError, match=r'set\.no name: "no name" is not allowed'):
        make_policy_row(outputs(1.3), outputs(1.0), replace(STATED, settings={"no name": "4"}))
