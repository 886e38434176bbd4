"""Environment variables by which the processes of a run know which run and attempt they belong to."""

from __future__ import annotations

RUN_ID_VARIABLE = "HPCRUN_RUN_ID"
"""Set by the supervisor in everything it starts: the identity by which the processes of a run are known."""
RUN_DIR_VARIABLE = "HPCRUN_RUN_DIR"
"""Set beside it: where the run is."""
ATTEMPT_VARIABLE = "HPCRUN_ATTEMPT"
"""The same for an attempt: set in its launcher and its ranks."""
WORKER_SOCKET_VARIABLE = "HPCRUN_WORKER_SOCKET"
"""The socket of the node's checkpoint worker, in every rank where saves go through memory."""
NODE_MARK = "{node}"
"""Stands in it for the node; each rank puts the name of its own there."""
