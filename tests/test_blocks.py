"""The block pool loses no block, gives none to two owners and keeps block 0 to itself."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from qwen_mtp.runtime.blocks import BlockPool


class Pool(RuleBasedStateMachine):
    """Sequences that start, grow and end, in any order."""

    sequences: Bundle[list[int]] = Bundle("sequences")

    @initialize(blocks=st.integers(2, 12))
    def start(self, blocks: int) -> None:
        self.pool, self.all = BlockPool(blocks), set(range(1, blocks))
        self.owned: list[list[int]] = []

    @rule(target=sequences)
    def begin(self) -> list[int]:
        self.owned.append([])
        return self.owned[-1]

    @rule(sequence=sequences)
    def grow(self, sequence: list[int]) -> None:
        taken = {block for blocks in self.owned for block in blocks}
        if not self.all - taken:
            with pytest.raises(AssertionError, match="every slot"):
                self.pool.take()
            return
        block = self.pool.take()
        assert block == min(self.all - taken), "equal work gives equal tables"
        sequence.append(block)

    @rule(sequence=consumes(sequences))
    def end(self, sequence: list[int]) -> None:
        self.pool.give_back(sequence)
        self.owned = [blocks for blocks in self.owned if blocks is not sequence]

    @rule(sequence=sequences)
    def end_twice(self, sequence: list[int]) -> None:
        """A returned block must not be returned again."""
        if sequence:
            self.pool.give_back(sequence)
            with pytest.raises(AssertionError, match="twice"):
                self.pool.give_back(sequence)
            sequence.clear()

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if not hasattr(self, "pool"):
            return
        taken = [block for blocks in self.owned for block in blocks]
        assert len(taken) == len(set(taken)), "a block has two owners"
        assert 0 not in taken
        assert self.pool.num_free == len(self.all) - len(taken), "a block is lost"

    def teardown(self) -> None:
        """When all have ended, the pool hands out every block but 0, once."""
        if not hasattr(self, "pool"):
            return
        for blocks in self.owned:
            self.pool.give_back(blocks)
        drained: list[Any] = [self.pool.take() for _ in self.all]
        assert drained == sorted(self.all)
        assert self.pool.num_free == 0


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_empty_pool_of_one_block_has_nothing_to_give() -> None:
    pool = BlockPool(1)
    assert pool.num_free == 0
    with pytest.raises(AssertionError):
        pool.take()
