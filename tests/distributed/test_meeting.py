"""How the tiers of a run part."""

from __future__ import annotations

from tests.distributed.launch import run_tiers


def test_what_a_tier_sent_arrives_although_its_process_ends_at_once() -> None:
    """AlexNet's owner sent 228 MB of final weights and ended; the others lost it half way."""
    sent, received = run_tiers(
        "tests.distributed.meeting_cases:send_and_end",
        world_size=2,
        timeout_seconds=60,
        megabytes=192,
    )
    assert sent is None
    assert received == 192 << 20
