"""The block allocator of the paged pool. Block 0 belongs to nobody and is never handed out."""


class BlockPool:
    """Free blocks, lowest first, so that equal work gives equal tables."""

    def __init__(self, num_blocks: int) -> None:
        """Start with blocks ``1 .. num_blocks - 1`` free."""
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self) -> int:
        """Hand out a block; the pool is sized so that every slot can reach the longest context."""
        assert self._free, "the geometry reserves blocks for every slot"
        return self._free.pop()

    def give_back(self, blocks: list[int]) -> None:
        """Return the blocks of a finished sequence."""
        assert not set(blocks) & set(self._free), "a block was returned twice"
        self._free = sorted([*self._free, *blocks], reverse=True)
