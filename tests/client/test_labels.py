"""Labels of charts: near what they name, off what is drawn, apart from one another."""

from __future__ import annotations

import pytest

from slipstream_client.report.labels import Label, Room, Stroke, spread


@pytest.mark.parametrize(
    ("anchor", "left", "right"), [("start", 100.0, 112.0), ("middle", 94.0, 106.0), ("end", 88.0, 100.0)]
)
def test_a_label_takes_the_room_of_its_characters_at_its_anchor(anchor: str, left: float, right: float) -> None:
    assert Label("16", 100.0, 50.0, anchor, 10.0).box == pytest.approx((left, 40.7, right, 52.4))


@pytest.mark.parametrize(
    ("stroke", "crosses"),
    [
        ((0, 45, 200, 45), True),
        ((105, 0, 105, 41), True),
        ((0, 53, 200, 53), False),
        ((113, 0, 113, 99), False),
        ((90, 30, 120, 60), True),
        ((90, 50, 101, 39), False),  # past its corner
        ((0, 45, 99, 45), False),  # ends before it
        ((102, 42, 104, 44), True),  # within it
    ],
)
def test_a_stroke_crosses_a_label_where_it_passes_through_its_box(stroke: Stroke, crosses: bool) -> None:
    assert Label("16", 100.0, 50.0, "start", 10.0).crossed_by(stroke) is crosses


def test_a_label_takes_the_first_free_place_around_its_mark() -> None:
    room = Room(0, 0, 200, 100)
    placed = [room.place("16", 100, 50, 10) for _ in range(9)]
    found = [(label.x, label.y, label.anchor) for label in placed if label]
    assert found[:4] == [(106, 44, "start"), (94, 44, "end"), (106, 63, "start"), (94, 63, "end")]
    assert not any(one.overlaps(other) for at, one in enumerate(room.labels) for other in room.labels[:at])
    assert placed[-1] is None


def test_no_label_leaves_the_plot() -> None:
    room = Room(0, 0, 200, 100)
    corner = room.place("continuous", 195, 3, 10)
    assert corner
    assert (corner.x, corner.y, corner.anchor) == (189, 16, "end")
    assert room.place("x" * 40, 100, 50, 10) is None


def test_labels_are_spread_as_little_as_they_must() -> None:
    assert spread([10.0, 100.0], 15, 0, 200) == [10.0, 100.0]
    assert spread([50.0, 50.0, 50.0], 15, 0, 200) == [35.0, 50.0, 65.0]
    assert spread([20.0, 40.0, 44.0, 60.0], 15, 0, 200) == [18.5, 33.5, 48.5, 63.5]  # around their mean, 41
    assert spread([], 15, 0, 200) == []


def test_labels_at_an_end_are_spread_away_from_it() -> None:
    assert spread([0.0, 1.0, 2.0], 15, 5, 200) == [5.0, 20.0, 35.0]
    assert spread([200.0] * 10, 15, 0, 200) == [65.0 + 15 * at for at in range(10)]


def test_more_labels_than_have_room_stand_evenly() -> None:
    assert spread([7.0] * 5, 15, 0, 40) == [0.0, 10.0, 20.0, 30.0, 40.0]
