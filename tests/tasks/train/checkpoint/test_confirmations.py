from __future__ import annotations

from trainwright.tasks.train.checkpoint.confirmations import FAILED, SPILLED, STORED, Confirmations

ONE, TWO = {"a": {"sha256": "1", "size_bytes": 1}}, {"b": {"sha256": "2", "size_bytes": 2}}


def test_rank_0_is_answered_when_every_rank_has_spoken_and_once() -> None:
    parts = Confirmations([0, 1])
    parts.note(1, {"step": 5, "where": STORED, "files": TWO})
    parts.ask(5)
    assert parts.answer() is None
    parts.note(0, {"step": 5, "where": STORED, "files": ONE})
    assert parts.answer() == {"files": ONE | TWO, "stored": True, "failed": None}
    assert parts.answer() is None


def test_what_was_spilled_counts_as_stored_when_the_rank_says_so_and_keeps_its_files() -> None:
    parts = Confirmations([0, 1])
    parts.note(0, {"step": 5, "where": STORED, "files": ONE})
    parts.note(1, {"step": 5, "where": SPILLED, "files": TWO})
    assert parts.known(5) == {"files": ONE | TWO, "stored": False, "failed": None}
    parts.note(1, {"step": 5, "where": STORED})
    assert parts.known(5) == {"files": ONE | TWO, "stored": True, "failed": None}


def test_a_part_that_failed_says_why_and_one_that_is_unknown_is_not_stored() -> None:
    parts = Confirmations([0, 1])
    assert parts.known(5)["stored"] is False
    parts.note(0, {"step": 5, "where": STORED, "files": ONE})
    parts.note(1, {"step": 5, "where": FAILED, "files": {}, "why": "the disk is full"})
    assert parts.known(5)["failed"] == "the disk is full"


def test_what_a_lost_rank_had_not_stored_fails_and_what_it_had_stays_whole() -> None:
    parts = Confirmations([0, 1])
    parts.note(1, {"step": 5, "where": STORED, "files": TWO})
    parts.ask(5)
    parts.lost(1)
    parts.lost(7)  # of another world
    assert parts.answer() is None
    parts.note(0, {"step": 5, "where": STORED, "files": ONE})
    assert parts.answer() == {"files": ONE | TWO, "stored": True, "failed": None}
    parts.ask(9)
    parts.note(0, {"step": 9, "where": STORED, "files": ONE})
    found = parts.answer()
    assert found is not None
    assert found["failed"] == "rank 1 was lost before its part was in the store"
