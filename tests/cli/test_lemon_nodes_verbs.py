"""`hpcrun fabric nodes` and `drain-request`: what they print, post and refuse."""

from __future__ import annotations

import io
import json
import shlex
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from hpcrun.cli.main import main
from hpcrun.health.lemon_nodes import NodeFault, append_node_faults, node_fault_file

HOUR = 3600.0


@pytest.fixture(autouse=True)
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    now = time.time()
    log = "/scratch/runs/hardy-1129/agents/n03.log"
    lost = NodeFault("n03", now - HOUR, "node lost", "hardy-1129", 2, "its agent said nothing", log, job=61)
    crash = NodeFault("n04", now - HOUR, "crash", "other-1128", 1, "rank 3 was killed by signal 7")
    full = NodeFault("n05", now, "preflight", "hardy-1130", 1, 'space: "/tmp" is $(full); rm -rf /')
    append_node_faults(node_fault_file(), [lost, crash, full])
    return node_fault_file()


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["fabric", *words])
    code = int(str(ended.value.code or 0))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_the_worst_nodes_come_first_with_their_last_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "nodes")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("n03  score 1.98  avoided until 20")
    assert lines[0].endswith("node lost 1x")
    assert lines[1].endswith("run hardy-1129: its agent said nothing")
    assert lines[2] == "    log: /scratch/runs/hardy-1129/agents/n03.log"
    assert lines[3].startswith("n05  score 1.50  avoided until")
    assert lines[5] == "n04  score 0.59  not avoided  crash 1x"
    assert "n05" not in run(capsys, "nodes", "--top", "1")[1]


def test_json_has_the_same(capsys: pytest.CaptureFixture[str], seen: Path) -> None:
    with seen.open("a") as file:
        file.write("torn\n")
    code, out, err = run(capsys, "nodes", "--json", "--top", "2")
    found = json.loads(out)
    assert (code, found["schema_version"], found["more"]) == (0, 2, 1)
    first, second = found["nodes"]
    assert (first["node"], first["causes"], first["last"]["run"]) == ("n03", {"node lost": 1}, "hardy-1129")
    assert first["avoided_until"] > time.time() + 2 * 86400
    assert second["node"] == "n05"
    assert err == f"hpcrun: {seen}: no entries, and skipped: line 4\n"


def test_a_node_is_forgotten(capsys: pytest.CaptureFixture[str], seen: Path) -> None:
    assert run(capsys, "avoid", "n03", "--reason", "fan")[0] == 0
    code, out, err = run(capsys, "nodes", "--forget", "n[03-04]")
    assert (code, out) == (0, f"{seen}\n")
    assert err == "hpcrun: n03 stays in a list of bad nodes (fan); see `hpcrun fabric avoid`\n"
    assert [one["node"] for one in json.loads(run(capsys, "nodes", "--json")[1])["nodes"]] == ["n05"]
    assert run(capsys, "nodes", "--forget", "n05")[0] == 0
    assert run(capsys, "nodes")[1] == "your runs have seen nothing against any node\n"


def test_a_request_to_the_admin_has_all_that_he_needs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, "drain-request")
    assert (code, err) == (0, "")
    assert out.startswith("Please look at n[03,05], and drain them if you agree.\n")
    assert "node lost  run hardy-1129, job 61, attempt 2\n    its agent said nothing\n" in out
    assert "    log: /scratch/runs/hardy-1129/agents/n03.log\n" in out
    words = shlex.split(out.splitlines()[-1])
    assert words == [
        "scontrol", "update", "NodeName=n[03,05]", "State=DRAIN", "Reason=hpcrun: node lost, preflight"
    ]  # fmt: skip
    target = tmp_path / "request.txt"
    code, out, err = run(capsys, "drain-request", "n04", "--out", str(target))
    assert (code, out, err) == (0, "", f"hpcrun: written to {target}\n")
    assert "NodeName=n04 " in target.read_text()
    found = json.loads(run(capsys, "drain-request", "n04", "--json")[1])
    assert found["schema_version"] == 2
    assert found["nodes"][0]["seen"][0]["evidence"] == "rank 3 was killed by signal 7"


class Hook(BaseHTTPRequestHandler):
    status = 200
    taken: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.send_header("Location", "http://192.0.2.1/elsewhere")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[HTTPServer]:
    Hook.taken, Hook.status = [], 200
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def written(tmp_path: Path, url: str) -> str:
    path = tmp_path / "webhook"
    path.write_text(f"{url}\n")
    path.chmod(0o600)
    return str(path)


def test_a_webhook_gets_it_as_json(
    capsys: pytest.CaptureFixture[str], hook: HTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:3128")
    url = f"http://127.0.0.1:{hook.server_port}/services/T0/secret"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{url}\n"))
    assert run(capsys, "drain-request", "--webhook", "-")[0] == 0
    Hook.taken.clear()
    code, out, err = run(capsys, "drain-request", "--webhook", written(tmp_path, url))
    assert (code, err) == (0, "hpcrun: the webhook has accepted it\n")
    ((path, body),) = Hook.taken
    assert path == "/services/T0/secret"
    sent = json.loads(body)
    assert sent["text"] == out
    assert sent["command"].startswith("scontrol update 'NodeName=n[03,05]' State=DRAIN")
    assert [one["node"] for one in sent["nodes"]] == ["n03", "n05"]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_webhook_that_refuses_is_told_in_one_line_without_its_secret(
    capsys: pytest.CaptureFixture[str], hook: HTTPServer, status: int, tmp_path: Path
) -> None:
    Hook.status = status
    url = f"http://127.0.0.1:{hook.server_port}/services/T0/secret"
    code, out, err = run(capsys, "drain-request", "--webhook", written(tmp_path, url))
    assert code == 3
    assert err.startswith(f"hpcrun: the webhook at 127.0.0.1 did not take it: {status} ")
    assert err.count("\n") == 1
    assert "secret" not in err
    assert out.startswith("Please look at"), "the text is not lost with it"
    assert len(Hook.taken) == 1


def test_a_webhook_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "drain-request", "--webhook", written(tmp_path, "http://localhost:1/x"))
    assert code == 3
    assert err == (
        "hpcrun: the webhook at localhost did not take it: [Errno 111] Connection refused;"
        " --out FILE keeps the text\n"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nodes", "--forget", "n09"], "--forget n09: nothing was seen of n09; seen were: n03, n05, n04"),
        (["nodes", "--forget", ""], "nothing was seen of no node"),
        (["nodes", "--forget", "@all"], "--forget"),
        (["nodes", "--top", "0"], "--top"),
        (["drain-request", "n[08-09]"], "n08, n09: nothing was seen there; seen were: n03, n05, n04"),
        (["drain-request", "n03", "--out", "/nowhere/x"], "/nowhere/x: cannot be written"),
        (
            ["drain-request", "--webhook", "https://h/secret"],
            "--webhook: a URL in a command is shown to",
        ),
        (["drain-request", "--webhook", "/nowhere/hook"], "--webhook: /nowhere/hook: cannot be read"),
        (["drain-request", "--webhook", "/proc/self/cmdline"], "--webhook: /proc/self/cmdline: has mode"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert text in err


def test_without_anything_seen_there_is_nothing_to_ask_for(
    capsys: pytest.CaptureFixture[str], seen: Path
) -> None:
    seen.unlink()
    assert run(capsys, "nodes") == (0, "your runs have seen nothing against any node\n", "")
    code, _, err = run(capsys, "drain-request")
    assert code == 2
    assert "no node is avoided for what your runs saw" in err


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://example.org/x", "--webhook: must be https://HOST/PATH"),
        ("https://", "--webhook: must be https://HOST/PATH"),
        ("file:///etc/passwd", "--webhook: must be https://HOST/PATH"),
        ("https://[::1/x", "--webhook: is not a URL"),
        ("https://h:port/x", "--webhook: is not a URL"),
    ],
)
def test_a_file_that_holds_no_webhook(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, url: str, text: str
) -> None:
    code, _, err = run(capsys, "drain-request", "--webhook", written(tmp_path, url))
    assert (code, text in err, err.count("\n")) == (2, True, 1)
