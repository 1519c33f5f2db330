"""Runs the graphs of an engine on rows of one's own choosing, beside the serving loop."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qwen_mtp.runtime.runner import Array, GraphRunner


@dataclass(frozen=True, slots=True)
class Lane:
    """What one batch slot does in a verify pass; the default is an idle slot.

    Attributes:
        ids: Token ids of its rows.
        start: Position of the first row.
        commit: Rows of its previous pass to commit.
    """

    ids: tuple[int, ...] = ()
    start: int = 0
    commit: int = 0


class Bench:
    """An engine whose slots own fixed blocks; nothing here allocates or samples."""

    def __init__(self, engine: GraphRunner) -> None:
        """Give slot b the blocks ``1 + b * W .. (b + 1) * W``."""
        geometry = engine.package.manifest.geometry
        self.engine, self.geometry = engine, geometry
        self.config = engine.package.manifest.config
        self.slots, self.max_rows = geometry.max_num_seqs, geometry.max_rows
        blocks = np.arange(1, geometry.num_blocks, dtype=np.int32)
        self.table: npt.NDArray[np.int32] = blocks.reshape(self.slots, geometry.table_width)

    def graph(self, rows: int) -> str:
        """Name of the verify graph of a row bucket."""
        return f"target_verify_r{rows}"

    def prefill(self, slot: int, prompt: Sequence[int]) -> None:
        """Clear a slot and run a prompt through the prefill graph, without the drafter."""
        engine, rows = self.engine, self.geometry.prefill_chunk
        engine.clear_slot(slot)
        for start in range(0, len(prompt), rows):
            chunk = prompt[start : start + rows]
            self.neutral("prefill")
            engine.buffer("prefill", "token_ids")[0, : len(chunk)] = chunk
            engine.buffer("prefill", "num_valid")[:] = len(chunk)
            engine.buffer("prefill", "context_len")[:] = start
            width = engine.table_width(start + len(chunk))
            engine.run("prefill", self.table[slot : slot + 1, :width], slot)

    def feed(self, graph: str, lanes: Sequence[Lane]) -> None:
        """Fill the inputs of a verify graph; the sampler is greedy until told otherwise."""
        self.neutral(graph)
        names = ("token_ids", "num_valid", "context_len", "num_accepted")
        ids, valid, start, commit = (self.engine.buffer(graph, name) for name in names)
        for slot, lane in enumerate(lanes):
            ids[slot, : len(lane.ids)] = lane.ids
            valid[slot], start[slot], commit[slot] = len(lane.ids), lane.start, lane.commit

    def run(self, graph: str, positions: int) -> None:
        """Run a verify graph with a block table that covers ``positions``."""
        self.engine.run(graph, self.table[:, : self.engine.table_width(positions)])

    def neutral(self, graph: str) -> None:
        """Idle slots, absent ids (-1), a greedy sampler without bans."""
        for tensor in self.engine.package.graph(graph).inputs:
            if tensor.state is None and tensor.name != "block_table":
                absent = tensor.name in ("token_ids", "next_token_ids", "stop_ids")
                value = -1 if absent else 1 if tensor.name == "top_p" else 0
                self.engine.buffer(graph, tensor.name)[:] = value

    def recurrent(self) -> Iterator[tuple[str, Array]]:
        """Windows and recurrent states of all slots, as the next run reads them."""
        for state in self.engine.package.manifest.states:
            if state.kind in ("conv", "ssm"):
                yield state.name, self.engine.state(state.name)

    def snapshot(self) -> dict[str, Array]:
        """Copies of what :meth:`recurrent` gives."""
        return {name: state.copy() for name, state in self.recurrent()}

    def restore(self, states: Mapping[str, Array]) -> None:
        """Go back to a snapshot."""
        for name, data in states.items():
            self.engine.state(name)[:] = data

    def row(self, graph: str, slot: int, row: int, position: int) -> Iterator[tuple[str, Array]]:
        """Everything the last pass computed for one row, in the order of the layers."""
        for state in self.engine.package.manifest.states:
            if state.kind == "stash":
                yield state.name, self.engine.state(state.name)[slot, row]
            elif state.kind == "kv":
                yield state.name, self.engine.state(state.name)[:, self.pool_slot(slot, position)]
        for name in ("hidden", "logits"):
            yield name, self.engine.buffer(graph, name)[slot, row]

    def pool_slot(self, slot: int, position: int) -> int:
        """Where a position of a slot's sequence lies in the pools."""
        size = self.geometry.block_size
        return int(self.table[slot, position // size]) * size + position % size

    def some_ids(self, seed: int, count: int) -> tuple[int, ...]:
        """Token ids from a seed."""
        ids = np.random.default_rng(seed).integers(0, self.config.vocab_size, count)
        return tuple(ids.tolist())
