"""Codecs that may pack the tensors on a link, and what is assumed of those not measured."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_hiertrain.profiles import CodecProfile, Profile

NONE = "none"
COMPRESSION = (NONE, "fp16", "int8", "int8+zstd")
"""What `hiertrain` chooses from where compression is allowed."""
QUANTISERS = tuple(f"minmax{bits}" for bits in range(2, 9))
"""JALAD's: min-max quantisation to 2..8 bits, entropy-coded."""

_FIGURES = {
    NONE: (1.0, 0.0),
    "fp16": (0.5, 2.5e-10),
    "int8": (0.25, 1e-9),
    "int8+zstd": (0.2, 4e-9),
    **{f"minmax{bits}": (0.8 * bits / 32, 1e-8) for bits in range(2, 9)},
}
"""Ratio of bytes, and seconds per byte to pack or to unpack, on any tier: guesses until a profile
holds better ones."""


def codec_profile(profile: Profile, name: str) -> CodecProfile:
    """Returns the profile's figures for a codec, or the default ones.

    Raises:
        ValueError: If neither is known.
    """
    if name == NONE:
        return CodecProfile(bytes_ratio=1.0, accuracy_loss=0.0)
    if name in profile.codecs:
        return profile.codecs[name]
    if name not in _FIGURES:
        raise ValueError(
            f"the codec {name!r} is unknown; the codecs are "
            f"{sorted({*_FIGURES, *profile.codecs})}, and a profile may name more"
        )
    ratio, seconds = _FIGURES[name]
    return CodecProfile(
        bytes_ratio=ratio,
        encode_seconds_per_byte=dict.fromkeys(profile.tiers, seconds),
        decode_seconds_per_byte=dict.fromkeys(profile.tiers, seconds),
    )


def quantisers_within(profile: Profile, accuracy_loss_limit: float) -> tuple[str, ...]:
    """Returns JALAD's codecs within the limit; 8 bits alone if none was measured."""
    measured = [name for name in QUANTISERS if _loss(profile, name) is not None]
    if not measured:
        return (QUANTISERS[-1],)
    return tuple(name for name in measured if (_loss(profile, name) or 0.0) <= accuracy_loss_limit)


def allowed_codecs(
    profile: Profile, compression: bool | Iterable[str], accuracy_loss_limit: float
) -> tuple[str, ...]:
    """Returns the codecs that a plan may use: `none`, and with compression those within the limit.

    Raises:
        ValueError: If a codec is unknown.
    """
    if compression is False:
        return (NONE,)
    if compression is True:
        names: tuple[str, ...] = (*COMPRESSION, *quantisers_within(profile, accuracy_loss_limit))
    else:
        names = (NONE, *compression)
    names = tuple(dict.fromkeys(names))
    return tuple(
        name
        for name in names
        if (codec_profile(profile, name).accuracy_loss or 0.0) <= accuracy_loss_limit
    )


def candidates(policy: str, compression: bool | Iterable[str]) -> tuple[str, ...]:
    """Returns the codecs that plans of a policy may come to use, to be measured ahead."""
    names: tuple[str, ...] = ()
    if compression is True:
        names = (*COMPRESSION, *QUANTISERS)
    elif compression is not False:
        names = tuple(compression)
    if policy == "jalad":
        names = (*names, *QUANTISERS)
    return tuple(name for name in dict.fromkeys(names) if name != NONE)


def _loss(profile: Profile, name: str) -> float | None:
    return profile.codecs[name].accuracy_loss if name in profile.codecs else None
