"""The hosts that a run waits for are those of which the last event says so."""

from __future__ import annotations

from typing import Any

from trainwright.tasks.train.record.waiting_hosts import waiting_hosts


def notice(host: str, message: str, *, waits: bool) -> dict[str, Any]:
    return {"event": "notice", "host": host, "waits": waits, "message": message}


def test_a_host_waits_until_it_has_come() -> None:
    first = notice("a", "waits", waits=True)
    expected = notice("a", "waits, expected at 12:00", waits=True)
    other = notice("b", "waits", waits=True)
    came = notice("a", "has come", waits=False)
    plain = {"event": "notice", "message": "link measured"}
    assert waiting_hosts([plain, first]) == [first]
    assert waiting_hosts([first, other, expected]) == [other, expected]
    assert waiting_hosts([first, other, came]) == [other]
    assert waiting_hosts([came, first]) == [first]


def test_a_launch_without_a_host_does_not_wait_for_it() -> None:
    waits = [notice(name, "waits", waits=True) for name in ("a", "b")]
    launch = {"event": "ranks", "devices": ["b/cpu-0", "c/cpu-0"]}
    assert waiting_hosts([*waits, launch]) == waits[1:]
