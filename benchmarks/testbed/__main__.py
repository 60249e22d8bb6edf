"""The testbed's command line."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.testbed import set_rate
from benchmarks.testbed.config import DEFAULT, read_config
from benchmarks.testbed.testbed import (
    MissingError,
    Testbed,
    clean,
    lacks,
    living,
    write_result,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0; 1 if a host's command failed; 2 if there is no testbed; 124 if the time ran out.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    parsed = _parser().parse_args(words)
    commands = {"run": _run, "calibrate": _calibrate, "rate": _rate, "clean": _clean}
    try:
        return commands[parsed.command](parsed, command)
    except (MissingError, ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"testbed: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("testbed: interrupted; everything is removed\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed", description="Three hosts on one Linux machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run", help="run a command on every host: run [CONFIG] [options] -- COMMAND"
    )
    calibrate = commands.add_parser("calibrate", help="measure links and tiers, and remove them")
    for each in (run, calibrate):
        each.add_argument("config", nargs="?", default=DEFAULT, type=Path, help="a TOML file")
        each.add_argument("--output", type=Path, help="folder for logs and results")
    run.add_argument("--timeout", type=float, default=3600, help="seconds until all are ended")
    run.add_argument("--no-calibration", action="store_true", help="run at once")
    run.add_argument("--join-at-start", action="store_true", help="limit the CPU from the start on")
    rate = commands.add_parser("rate", help="change a link of the running testbed")
    rate.add_argument("link", help="for example edge-cloud")
    rate.add_argument("mbit", type=float)
    commands.add_parser("clean", help="remove what killed testbeds have left")
    return parser


def _run(parsed: argparse.Namespace, command: list[str]) -> int:
    if not command:
        raise ValueError("no command is given; write it after `--`")
    config = read_config(parsed.config)
    output = parsed.output or Path("runs", "testbed", time.strftime("%Y%m%d-%H%M%S"))
    with Testbed(config, say=_say) as bed:
        output.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(parsed.config, output / "testbed.toml")
        if not parsed.no_calibration:
            _tell_calibration(bed, output)
        ended = bed.run(
            command,
            output,
            timeout_seconds=parsed.timeout,
            joins_at_start=parsed.join_at_start,
        )
    write_result(output, ended)
    for tier, end in ended.items():
        how = "ended by the testbed" if end.returncode is None else f"exit {end.returncode}"
        _say(f"{tier}: {how} after {end.seconds:.1f} s")
        if not end.joined_quota:
            _say(f"{tier}: never joined its CPU quota; call `benchmarks.testbed.join_quota()`")
    _say(f"logs and results: {output}")
    codes = [end.returncode for end in ended.values()]
    if any(codes):
        return 1
    return 124 if None in codes else 0


def _calibrate(parsed: argparse.Namespace, command: list[str]) -> int:
    with Testbed(read_config(parsed.config), say=_say) as bed:
        _tell_calibration(bed, parsed.output)
    return 0


def _tell_calibration(bed: Testbed, output: Path | None) -> None:
    calibration = bed.calibrate()
    _say(calibration.report())
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        text = json.dumps(calibration.to_dict(), indent=2) + "\n"
        (output / "calibration.json").write_text(text)


def _rate(parsed: argparse.Namespace, command: list[str]) -> int:
    sockets = living()
    if len(sockets) != 1:
        raise RuntimeError(f"one testbed must be running, there are {len(sockets)}")
    set_rate(parsed.link, parsed.mbit, control=str(sockets[0]))
    return 0


def _clean(parsed: argparse.Namespace, command: list[str]) -> int:
    if lacking := lacks():
        raise MissingError("; ".join(lacking))
    removed = clean()
    _say("\n".join(f"removed {name}" for name in removed) or "nothing was left")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
