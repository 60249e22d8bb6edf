"""The test launcher itself: it must neither hide a failure nor leave a process behind."""

import os
import select
import sys
import time

import pytest

from tests.distributed.launch import (
    Case,
    Command,
    RankError,
    free_ports,
    observe_cases,
    run_cases,
    run_processes,
    run_tiers,
)

CASES = "tests.distributed.launch_cases"


def test_every_rank_runs_the_function_with_its_own_environment(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    names = ["LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "COLOUR", "RANK"]

    results = run_tiers(
        f"{CASES}:environment",
        names=names,
        timeout_seconds=60,
        env=lambda rank: {"COLOUR": ("red", "green", "blue")[rank]},
    )

    assert [list(result.values()) for result in results] == [
        ["0", "0", "3", "1", "red", None],
        ["1", "0", "3", "1", "green", None],
        ["2", "0", "3", "1", "blue", None],
    ]


def test_several_cases_run_one_after_the_other_on_their_own_ports():
    names = ["MASTER_PORT"]
    cases = [
        Case(target=f"{CASES}:scale", kwargs={"factor": 2.5}),
        Case(target=f"{CASES}:environment", kwargs={"names": names}),
        Case(target=f"{CASES}:environment", kwargs={"names": names}),
    ]

    scaled, first, second = run_cases(cases, timeout_seconds=60)

    assert scaled == [0.0, 2.5, 5.0]
    assert first[0] == first[1] == first[2] != second[0]


def test_a_ranks_traceback_is_raised_and_the_waiting_ranks_are_killed():
    started = time.perf_counter()

    with pytest.raises(RankError, match=r"(?s)^rank 1 failed.*has had enough.*rank 0 was killed"):
        run_tiers(f"{CASES}:fail_on", rank=1, timeout_seconds=60)

    assert time.perf_counter() - started < 40


def test_a_rank_that_hangs_is_killed_at_the_limit_and_its_stack_shown():
    with pytest.raises(RankError, match=r"(?s)rank 0 was killed after.*in hang"):
        run_tiers(f"{CASES}:hang", world_size=1, timeout_seconds=5)


def test_a_killed_rank_is_told_apart_from_the_survivors():
    case = Case(target=f"{CASES}:die_on", kwargs={"rank": 1})

    outcomes = observe_cases([case], timeout_seconds=60)

    assert [outcome.exit.returncode for outcome in outcomes] == [0, -9, 0]
    assert [outcome.results for outcome in outcomes] == [["alive"], [], ["alive"]]


def test_children_of_a_process_do_not_outlive_the_run(tmp_path):
    script = (
        "import subprocess, sys, pathlib; "
        "child = subprocess.Popen(['sleep', '1000']); "
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid)); sys.exit(3)"
    )

    (end,) = run_processes([Command(argv=[sys.executable, "-c", script])], timeout_seconds=30)

    assert end.returncode == 3
    _wait_until_gone(int((tmp_path / "pid").read_text()), timeout_seconds=10)


def test_a_script_runs_as_main_with_its_arguments(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "assert __name__ == '__main__'\n"
        "open(sys.argv[1] + os.environ['LOCAL_RANK'], 'w').write(sys.argv[2])\n"
    )

    run_tiers(str(script), world_size=2, argv=[str(tmp_path / "out"), "hello"], timeout_seconds=60)

    assert (tmp_path / "out0").read_text() == (tmp_path / "out1").read_text() == "hello"


@pytest.mark.parametrize(
    ("layout", "num_nodes", "devices"), [("local", 1, 3), ("nodes", 3, 1)], ids=["local", "nodes"]
)
def test_a_trainer_takes_the_processes_for_its_ranks(layout, num_nodes, devices):
    case = Case(
        target=f"{CASES}:lightning_ranks", kwargs={"num_nodes": num_nodes, "devices": devices}
    )

    outcomes = observe_cases([case], layout=layout, timeout_seconds=120, stop_on_failure=True)

    assert [outcome.error for outcome in outcomes] == [None] * 3
    ranks = [outcome.results[0] for outcome in outcomes]
    assert [(rank["global_rank"], rank["world_size"]) for rank in ranks] == [(0, 3), (1, 3), (2, 3)]
    assert len({rank["port"] for rank in ranks}) == 1


def test_free_ports_differ():
    assert len(set(free_ports(20))) == 20


def _wait_until_gone(pid: int, timeout_seconds: float) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], timeout_seconds)[0], f"process {pid} still runs"
    finally:
        os.close(process)
