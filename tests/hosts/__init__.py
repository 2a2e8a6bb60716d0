"""Whole clusters on one machine: hosts in network namespaces, with faults in the middle of sweeps. On demand.

``python -m tests.hosts faults`` and ``python -m tests.hosts teams``, as root on Linux with iproute2 and PostgreSQL.
"""
