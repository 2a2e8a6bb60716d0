"""A node that is lost while it accounts: no trial fails, and every epsilon has the bits of the undisturbed run."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dpsweep.accounting.jobs.parallel import AccountingQueue
from tests.accounting.jobs.test_parallel import accounting_processes, disable_authentication
from tests.accounting.stored_trial import account_trial, job_of, write_trial


@pytest.mark.long
def test_a_lost_node_fails_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head without CPUs and two nodes; one is killed as soon as parts run, and another joins later."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # or else it listens on every interface
    ray = pytest.importorskip("ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    disable_authentication(monkeypatch)
    jobs = [job_of(str(tmp_path / str(number)), 1e-5) for number in range(4)]
    for job in jobs:
        write_trial(job.root, rows_per_part=16)
    expected = account_trial(jobs[0])
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        doomed = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        ray.init(cluster.address, log_to_driver=False, configure_logging=False)
        with AccountingQueue(1) as queue, ThreadPoolExecutor(len(jobs)) as threads:
            results = [threads.submit(account_trial, job, queue.scatter) for job in jobs]
            while not accounting_processes() and not all(result.done() for result in results):
                time.sleep(0.01)
            cluster.remove_node(doomed, allow_graceful=False)
            unfinished = sum(not result.done() for result in results)
            cluster.add_node(num_cpus=1)
            survived = [result.result(timeout=240) for result in results]
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert unfinished, "trials were being accounted when the node was lost"
    for epsilons in survived:
        np.testing.assert_array_equal(epsilons.upper, expected.upper)
        np.testing.assert_array_equal(epsilons.lower, expected.lower)
