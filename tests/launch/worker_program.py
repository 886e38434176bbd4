"""A checkpoint worker without memory: it holds what files in its folder say, and does as it is told.

worker_program.py FOLDER: FOLDER/NODE.json has the holdings of each node; FOLDER/NODE.log gets every order.
"""

import json
import os
import signal
import sys
from pathlib import Path


def main(folder: Path) -> None:
    def say(**message: object) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    node = ""
    greeting = sys.stdin.readline()
    version = folder / "version"
    sys.stdout.write(json.dumps({"hpcrun": version.read_text()}) + "\n" if version.exists() else greeting)
    for line in sys.stdin:
        order = json.loads(line)
        node = order.get("node", node)
        with (folder / f"{node}.log").open("a") as log:
            log.write(line)
        held = folder / f"{node}.json"
        match order["kind"]:
            case "configure_worker" if (folder / f"{node}.refuses").exists():
                say(kind="worker_error", why="no room for it")
            case "configure_worker" if not (folder / f"{node}.late").exists():
                say(kind="worker_ready", address=order["address"], port=os.getpid())
            case "take_inventory" if not (folder / f"{node}.silent").exists():
                holdings = json.loads(held.read_text()) if held.exists() else []
                damaged = folder / "damaged.json"
                if order.get("prove") and damaged.exists():
                    bad = json.loads(damaged.read_text())
                    for one in holdings:
                        one["parts"] = [each for each in one["parts"] if each["part"]["tail_hash"] not in bad]
                say(kind="worker_inventory", id=order["id"], holdings=holdings)
            case "rebuild_parts" if (folder / f"{node}.cannot").exists():
                say(kind="parts_rebuilt", id=order["id"], problem="it has no room")
            case "rebuild_parts":
                made = json.loads((folder / "rebuilt.json").read_text())
                say(kind="parts_rebuilt", id=order["id"], holding=made | {"node": node})
            case "ping_worker":
                say(kind="worker_pong")
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "say":
                say(**order["message"])
            case "die":
                sys.stderr.write("something went wrong\n")
                sys.exit(3)


main(Path(sys.argv[1]))
