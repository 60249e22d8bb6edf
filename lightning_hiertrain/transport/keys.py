"""CURVE keys: how they are made, where the private ones lie and how they are read back.

Public keys stand in the topology file that all tiers share; a private key lies in a file of its own
that only its owner may read, on its own tier.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import zmq

from lightning_hiertrain.topology import KEY_CHARACTERS, Topology


def make_keys(topology: Topology, directory: str | Path) -> Topology:
    """Makes a key pair for every tier and writes the private ones to `<tier>.key` (mode 0600).

    Returns:
        The topology with the public keys.

    Raises:
        ValueError: If one of the files exists already; none is written then.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {tier.name: directory / f"{tier.name}.key" for tier in topology.tiers}
    for path in paths.values():
        if os.path.lexists(path):
            raise ValueError(
                f"the key file {path} exists already; remove it if no run uses it, or "
                "choose another directory"
            )
    tiers = []
    for tier in topology.tiers:
        public, private = zmq.curve_keypair()
        descriptor = os.open(paths[tier.name], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(private + b"\n")
        tiers.append(replace(tier, public_key=public.decode()))
    return replace(topology, tiers=tuple(tiers))


def read_private_key(path: str | Path) -> str:
    """Reads a private key file.

    Raises:
        ValueError: If others than its owner may read it, or it holds no key.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(4096)
    except OSError as error:
        raise ValueError(
            f"the private key {path} cannot be read: {error}; make keys with `hiertrain keys`"
        ) from error
    if os.name == "posix" and mode & 0o077:
        raise ValueError(
            f"the private key {path} has mode {mode:04o}, so others may read it; run "
            f"`chmod 600 {path}`, or make new keys with `hiertrain keys` if it may have been copied"
        )
    return check_private_key(text.decode("ascii", errors="replace").strip(), where=str(path))


def check_private_key(key: str, *, where: str = "the private key") -> str:
    """Returns the key if it is one.

    Raises:
        ValueError: If it is not; the message does not show it.
    """
    public_key(key, where=where)
    return key


def public_key(private_key: str, *, where: str = "the private key") -> str:
    """Returns the public key that belongs to a private one.

    Raises:
        ValueError: If the private key is not one; the message does not show it.
    """
    try:
        if len(private_key) != KEY_CHARACTERS:
            raise ValueError(f"{len(private_key)} characters instead of {KEY_CHARACTERS}")
        return zmq.curve_public(private_key.encode("ascii")).decode()
    except (ValueError, zmq.ZMQError) as error:
        what = error if "characters" in str(error) else "characters that no key has"
        raise ValueError(
            f"{where} is not a CURVE key: {what}; make keys with `hiertrain keys`"
        ) from None


def check_tier_key(tier: str, topology: Topology, private_key: str) -> None:
    """Refuses a private key that is not the one of this tier.

    Raises:
        ValueError: If its public key is not the one in the topology.
    """
    expected, found = topology.tier(tier).public_key, public_key(private_key)
    if expected != found:
        owner = next((other.name for other in topology.tiers if other.public_key == found), None)
        whose = f"it is that of tier {owner!r}" if owner else "it belongs to none of its tiers"
        raise ValueError(
            f"the private key given to tier {tier!r} does not match its public key in the topology "
            f"({expected}); {whose}: give each tier its own key file, or make "
            "keys again with `hiertrain keys`"
        )
