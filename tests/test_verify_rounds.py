"""Which accept counts ``verify`` forces, and that it tells how many rounds that takes."""

from itertools import pairwise

import pytest

from qwen_mtp.checks_decoding import EVERY_PAIR, accept_counts
from qwen_mtp.progress import Silent
from qwen_mtp.verify import verify_package
from tests.packages import package, random_checkpoint


def test_forced_rounds_are_as_many_as_progress_was_promised() -> None:
    two = package(random_checkpoint(0), format="int8", max_num_seqs=2, lookaheads=(1, 3))
    promised: list[tuple[str, int]] = []
    done: list[int] = []

    class Counter(Silent):
        def phase(self, title: str, total: int = 0, unit: str = "") -> None:
            promised.append((title, total))
            done.append(0)

        def advance(self, amount: int) -> None:
            done[-1] += amount

    report = verify_package(two.directory, threads=1, progress=Counter())
    (place,) = [i for i, (title, _) in enumerate(promised) if title == "verify decoding"]
    assert promised[place][1] == done[place] == report.patterns


@pytest.mark.parametrize("lookahead", range(1, EVERY_PAIR + 1))
def test_every_accept_count_is_forced_after_every_other(lookahead: int) -> None:
    order = accept_counts(lookahead)
    counts = range(lookahead + 1)
    assert {*pairwise(order)} == {(i, j) for i in counts for j in counts}
    assert len(order) == (lookahead + 1) ** 2 + 1, "no shorter order does"


def test_large_lookaheads_force_every_accept_count_after_none_itself_and_all() -> None:
    order = accept_counts(15)
    pairs = {*pairwise(order)}
    assert pairs >= {(i, i) for i in range(16)} | {(0, i) for i in range(16)} | {
        (i, 15) for i in range(16)
    }
    assert len(order) <= 64
