"""Failover: a run continues when its supervisor dies, on the same host or on another node.

What is lost, who notices, and who continues:

    supervisor killed alone   its parent, the guardian (guardian.py), restarts it on the same host;
                              LocalRecovery (local_recovery.py) decides how it continues
    batch host lost           the agents (LeaseMonitor, lease_monitor.py); one of them claims the next
                              epoch and starts SuccessorProcess (successor_process.py), which runs
                              `_failover RUN EPOCH` (failover_main.py)

States of an agent that hears nothing (LeaseMonitor.look), by its own clock:

    hearing ──QUIET_S without a message──> watching the lease
    watching ──the lease moves──> watching; a message──> hearing
    watching ──lease still for LEADER_TIMEOUT_S (HOST_TIMEOUT_S if the host is dead)──> bidding
    bidding  ──the lease moves──> watching ("withdraw")
    bidding  ──CONFIRM_S after its own write reached the file system──> claiming
    claiming ──claim_epoch wins──> starts the successor; loses──> watching for the new supervisor

States of a supervisor (Leadership, hpcrun/runs/lease.py):

    leading ──renews the lease every LEASE_RENEW_S──> leading
    leading ──a newer epoch exists──> fenced: writes nothing more, ends its ranks, exits (FencedError)

Only one supervisor acts at a time: an epoch is a file that one process can create, a supervisor stops at a
newer epoch than its own, and nobody claims one while the lease moves. FailoverState (state.py) is what a
successor knows; it also records the attempt that its predecessor could not finish.
"""
