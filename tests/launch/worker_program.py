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
    for line in sys.stdin:
        order = json.loads(line)
        node = order.get("node", node)
        with (folder / f"{node}.log").open("a") as log:
            log.write(line)
        held = folder / f"{node}.json"
        match order["do"]:
            case "configure" if (folder / f"{node}.refuses").exists():
                say(kind="error", why="no room for it")
            case "configure" if not (folder / f"{node}.late").exists():
                say(kind="ready", address=order["address"], port=os.getpid())
            case "inventory" if not (folder / f"{node}.silent").exists():
                holdings = json.loads(held.read_text()) if held.exists() else []
                damaged = folder / "damaged.json"
                if order.get("prove") and damaged.exists():
                    bad = json.loads(damaged.read_text())
                    for one in holdings:
                        one["parts"] = [each for each in one["parts"] if each["part"]["tail_hash"] not in bad]
                say(kind="inventory", id=order["id"], holdings=holdings)
            case "rebuild" if (folder / f"{node}.cannot").exists():
                say(kind="rebuilt", id=order["id"], problem="it has no room")
            case "rebuild":
                made = json.loads((folder / "rebuilt.json").read_text())
                say(kind="rebuilt", id=order["id"], holding=made | {"node": node})
            case "ping":
                say(kind="pong")
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "say":
                say(**order["message"])
            case "die":
                sys.stderr.write("something went wrong\n")
                sys.exit(3)


main(Path(sys.argv[1]))
