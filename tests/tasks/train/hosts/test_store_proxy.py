"""What the launcher answers a rank on a host that asks for what is not there, or is not the rank's to name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as checked
from hypothesis import strategies as st
from training_case import request

from trainwright.tasks.errors import BadInput
from trainwright.tasks.train.hosts.store_proxy import JOURNAL, StoreServer
from trainwright.tasks.train.record.journal import journal_of
from trainwright.tasks.train.request import Order


def server(folder: Path) -> StoreServer:
    """Of rank 1 of two."""
    order = Order(
        request=request(folder, [40, 20]), mode="train", backend="torch", started_at_s=0.0
    )
    return StoreServer(order, 1)


@pytest.mark.parametrize(
    "message",
    [
        {"do": "take", "area": "run", "part": "never-given"},
        {"do": "get", "area": "run", "key": "../../secret"},
        {"do": "give", "part": "p", "data": "abcde"},
        {"do": "put", "area": "run", "unknown": 1},
        {},
    ],
)
def test_a_question_that_can_not_be_answered_gets_an_error(
    message: dict[str, Any], tmp_path: Path
) -> None:
    answer = server(tmp_path).answer(message)
    assert set(answer) == {"error"}
    assert answer["error"]["message"]


@checked(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None
)
@given(
    st.one_of(
        st.text(),
        st.integers().filter(lambda n: n not in (0, 1)),
        st.booleans(),
        st.none(),
        st.floats(),
    )
)
def test_only_the_journals_of_the_launchs_ranks_can_be_named(tmp_path: Path, rank: object) -> None:
    serves = server(tmp_path)
    with pytest.raises(BadInput, match=r"journal: rank 1 named .*allowed: a rank, 0 to 1"):
        serves.note({"rank": rank, "text": "evil\n", "anew": True})
    assert (
        "allowed: a rank, 0 to 1"
        in serves.answer({"do": JOURNAL, "rank": rank})["error"]["message"]
    )
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_notes_its_own_rows_and_those_of_one_that_was_lost(
    rank: int, tmp_path: Path
) -> None:
    serves = server(tmp_path)
    serves.note({"rank": rank, "text": "{}\n", "anew": False})
    assert journal_of(tmp_path / "work", rank).read() == "{}\n"
    assert serves.answer({"do": JOURNAL, "rank": rank}) == {"value": "{}\n"}
