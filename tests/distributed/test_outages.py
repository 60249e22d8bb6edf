"""Links that fail for a moment cost time and nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.forked import run_scenarios
from tests.distributed.namespaces import Namespaces
from tests.distributed.outage_cases import KINDS, LINKS


def test_outages_of_both_kinds_lose_nothing_and_leave_the_same_weights(
    three_hosts: Namespaces, tmp_path: Path
) -> None:
    three_hosts.make_topology(tmp_path).to_json(tmp_path / "topology.json")
    scenario = {"topology": str(tmp_path / "topology.json"), "namespaces": three_hosts.names}
    (report,) = run_scenarios(
        "tests.distributed.outage_cases",
        [("train_with_outages", {**scenario, "count": 15, "seed": 3, "longest": 0.8})],
        timeout_seconds=120,
    )
    assert report["codes"] == {"device": 0, "edge": 0, "cloud": 0}, report["outputs"]
    struck = {(each["outage"]["link"], each["outage"]["kind"]) for each in report["struck"]}
    assert struck == {(link, kind) for link in LINKS for kind in KINDS}
    assert len(report["struck"]) == 15
    assert len(set(report["steps"])) == 1
    assert report["steps"][0] > 30
    assert max(report["differences"]) < 1e-5
