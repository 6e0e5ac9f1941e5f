"""How long a sequence is kept whose graphs run on no rank."""

from collections.abc import Iterable

from compiled_ddp.step.agreed_sequence import BEGINNINGS_UNSEEN, Patience


def ends_after(patience: Patience, backwards: Iterable[bool]) -> list[int]:
    """After which of these backwards, told by whether graphs fitted on some rank, the sequence was left."""
    left = []
    for number, fits in enumerate(backwards, start=1):
        patience.note_backward(fits_some_rank=fits)
        if patience.is_over:
            left.append(number)
            patience.begin_anew()
    return left


def test_a_sequence_whose_graphs_have_run_is_left_after_two_mismatches_and_then_after_twice_as_many() -> None:
    patience = Patience()
    runs = ([True] + [False] * mismatches for mismatches in (2, 4, 8))
    assert [ends_after(patience, run) for run in runs] == [[3], [5], [9]]


def test_mismatches_count_in_a_row() -> None:
    assert ends_after(Patience(), [True, False, True, False, True, False]) == []
    assert ends_after(Patience(), [True, False, True, False, False]) == [5]


def test_a_sequence_whose_graphs_no_rank_has_run_is_left_at_once_but_so_often_at_most() -> None:
    patience = Patience()
    assert ends_after(patience, [False] * BEGINNINGS_UNSEEN) == [*range(1, BEGINNINGS_UNSEEN + 1)]
    assert ends_after(patience, [False, False]) == [2]  # from then on like any other


def test_what_is_over_is_told_once() -> None:
    patience = Patience()
    patience.note_backward(fits_some_rank=False)
    assert patience.is_over
    patience.note_backward(fits_some_rank=True)
    assert not patience.is_over


def test_asking_changes_nothing() -> None:
    patience = Patience()
    ends_after(patience, [True, False])
    assert not any(patience.is_over for _ in range(5))
    assert ends_after(patience, [False]) == [1]
