"""Host lists that others have got wrong, and text that is none."""

from __future__ import annotations

import pytest

from hpcrun.errors import UsageError
from hpcrun.hostlist import MAX_HOSTS, expand_hosts, fold_hosts, sort_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        # a host behind a bracket got lost (dinov2#495)
        ("node1g[0010,0011],node2g0005,node3g0007", "node1g0010 node1g0011 node2g0005 node3g0007"),
        # the first host was taken for nodeB001 (Megatron-Bridge#3807)
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        # rejected (mpich#2786, #5653, #3946)
        ("host-[001-002]", "host-001 host-002"),
        ("c[1-2]", "c1 c2"),
        ("n", "n"),
        # rejected (pavilion2#524)
        ("foo-[10-11]-[01-02]", "foo-10-01 foo-10-02 foo-11-01 foo-11-02"),
        ("n03d,n04d", "n03d n04d"),
        # ranges left folded (skypilot#8891)
        ("a[1-2],b[3-4]", "a1 a2 b3 b4"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        # mixed ranges (scoop#30)
        ("host[001,003-004,006]", "host001 host003 host004 host006"),
        # a partition's Nodes= with an empty term (dask-jobqueue#238)
        (",c005,,c[007-008],", "c005 c007 c008"),
        ("n[01-02]-ib", "n01-ib n02-ib"),
        ("n[9-11]", "n9 n10 n11"),
        # Slurm folds so where numbers outgrow their padding
        ("cn[098-101]", "cn098 cn099 cn100 cn101"),
        ("cn[99-101]", "cn99 cn100 cn101"),
        ("cn[098-0101]", "cn098 cn099 cn100 cn101"),
        ("cn[999-1001]", "cn999 cn1000 cn1001"),
        ("cn[00-02]-ib", "cn00-ib cn01-ib cn02-ib"),
        ("n[3,1]", "n3 n1"),
        ("n[123456789012-123456789013]", "n123456789012 n123456789013"),
        ("n1,n01,n1", "n1 n01"),
        ("rack2-n1,rack1-n1", "rack2-n1 rack1-n1"),
        ("gpu.site.org,gpu2.site.org", "gpu.site.org gpu2.site.org"),
    ],
)
def test_expand(text: str, hosts: str) -> None:
    assert expand_hosts(text) == tuple(hosts.split())


@pytest.mark.parametrize("text", ["", " ", "(null)", "None assigned", "None", "N/A"])
def test_what_slurm_prints_for_no_hosts_is_no_hosts(text: str) -> None:
    assert expand_hosts(text) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("@all", "'@all' is not a host list"),
        ("n[1-3]!n2", "is not a host list"),
        ("n1&n2", "is not a host list"),
        ("n[1-3]/2", "is not a host list"),
        ("n*", "is not a host list"),
        ("-n1", "is not a host list"),
        ("n1 n2", "is not a host list"),
        ("n[1-2", "is not a host list"),
        ("n]1-2[", "is not a host list"),
        ("n[1-[2]]", "is not a host list"),
        ("n[]", "is not a host list"),
        ("nöde", "is not a host list"),
        ("n[3-1]", "counts down from 3 to 1; write \\[1-3\\]"),
        ("n[1-100000]", f"at most {MAX_HOSTS}"),
        ("n[1-999]m[1-999]", f"at most {MAX_HOSTS}"),
        ("switch{leaf1}", "names a switch or block"),
    ],
)
def test_what_is_no_host_list_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"^job.yaml:4 exclude: .*{says}") as raised:
        expand_hosts(text, "job.yaml:4 exclude")
    assert "\n" not in str(raised.value)


def test_hosts_are_put_in_the_order_of_their_numbers() -> None:
    # sorted as text these come out as node66 node7 node70 node8 (pytorch#191190)
    names = ["node7", "node66", "node8", "node70"]
    assert sort_hosts(names) == ("node7", "node8", "node66", "node70")
    assert expand_hosts(",".join(names)) == tuple(names)


def test_fold_is_undone_by_expand() -> None:
    for hosts in (
        ["n01", "n02", "n03", "n05", "gpu-a1"],
        ["n03d", "n04d"],
        ["r1n1", "r1n2", "r2n1", "r2n2"],
        [],
    ):
        assert sorted(expand_hosts(fold_hosts(hosts))) == sorted(hosts)
    assert fold_hosts(["n05", "n01", "n02", "n03"]) == "n[01-03,05]"


def test_numbers_that_outgrow_their_padding_are_folded_and_unfolded() -> None:
    hosts = [f"cn{number:03}" for number in range(1, 1025)]
    assert list(expand_hosts("cn[001-1024]")) == hosts
    assert set(expand_hosts(fold_hosts(hosts))) == set(hosts)
    assert sort_hosts(reversed(hosts)) == tuple(hosts)


def test_old_slurm_is_spared_text_behind_a_bracket() -> None:
    assert fold_hosts(["n02-ib", "n01-ib", "n1", "n2"]).endswith("-ib")
    assert fold_hosts(["n02-ib", "n01-ib", "n1", "n2"], suffixes=False).count("[") == 1
    assert set(expand_hosts(fold_hosts(["n02-ib", "n01-ib", "n1"], suffixes=False))) == {
        "n01-ib",
        "n02-ib",
        "n1",
    }


@pytest.mark.parametrize("name", ["(null)", "None assigned", "@all", "n[1-2]", ""])
def test_only_names_are_folded(name: str) -> None:
    with pytest.raises(UsageError, match="is not a host name"):
        fold_hosts(["n1", name])
