"""How long a sequence is kept whose graphs run on no rank."""

# [Note: what a first backward shows] Only a graph that has reduced tells which of its parameters are used outside of it
# too. Where no rank has run the sequence's graphs, because of what will pass (a weight of 0, a rank that skips, a
# stance, another wrapper's turn), the next backward begins a new sequence; so often at most, as some ranks' graphs
# never run.
BEGINNINGS_UNSEEN = 3


class Patience:
    """Counts backwards in which no rank's graphs fitted, as after parts were frozen.

    A model whose graphs differ from step to step has no sequence that fits: the patience doubles every time it ends.
    """

    def __init__(self) -> None:
        self.is_over = False  # whether the sequence should be built anew
        self._mismatches = 0  # in a row
        self._most = 2  # of them
        self._seen = False  # whether the graphs of this sequence have run on some rank
        self._unseen = 0  # sequences that were left because they had not

    def begin_anew(self) -> None:
        """There is another sequence."""
        self._seen, self._mismatches = False, 0

    def note_backward(self, *, fits_some_rank: bool) -> None:
        """A backward has ended. [Note: what a first backward shows]"""
        self.is_over = False
        if fits_some_rank:
            self._mismatches, self._seen = 0, True
        elif not self._seen and self._unseen < BEGINNINGS_UNSEEN:
            self._unseen += 1
            self.is_over = True
        else:
            self._mismatches += 1
            if self._mismatches >= self._most:
                self._most *= 2
                self.is_over = True
