"""How many drafts each slot proposes in a round (docs/loop.md, docs/adr/0013).

Fixed: as many as fit. Adaptive: as many as pay, by what the graphs cost and by what was accepted
lately; none where drafting does not pay. Nothing here reads a token: greedy text is the same under
every choice. Sampled text is not, so a sampled slot looks at nothing but its own history and at
costs that follow from the package alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from qwen_mtp.graphs.spec import Geometry, GraphSpec
from qwen_mtp.runtime.costs import Costs, Meter, bucket
from qwen_mtp.runtime.package import Package

WINDOW = 24
"""Observed rounds that an estimate of acceptance remembers, the last ones most."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one slot wants of a round.

    Attributes:
        room: Most drafts that can be of use to it, 0..K.
        due: Rows wait for the drafter and one more would not fit: it must run.
        sampled: Its text depends on the number of drafts.
        given: Drafts that the caller proposes instead; None leaves it to the MTP head.
    """

    room: int
    due: bool = False
    sampled: bool = False
    given: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What is drafted in a round.

    Attributes:
        drafts: Drafts of each slot that the draft graph runs for, 0..room. The other slots have
            none; what the target gives for them waits for a later run.
        lookahead: K of the draft graph; 0 runs none.
    """

    drafts: Mapping[int, int]
    lookahead: int


NOTHING = Choice({}, 0)


class Lookahead(Protocol):
    """Chooses the drafts of each round."""

    def admit(self, slot: int) -> None:
        """A new sequence is in this slot."""
        ...

    def choose(self, needs: Mapping[int, Need]) -> Choice:
        """Choose for the round of all occupied slots; asking twice gives the same."""
        ...

    def observe(self, slot: int, drafted: int, accepted: int) -> None:
        """Take in what a round did for a slot."""
        ...

    def measure(self, spec: GraphSpec, ms: float) -> None:
        """Take in what a run of a draft or verify graph took, in milliseconds."""
        ...


class FixedLookahead:
    """As many drafts as fit, always by the same graph, which runs for every slot."""

    def __init__(self, geometry: Geometry, most: int) -> None:
        """At most ``most`` drafts a round; 0 never drafts."""
        self._lookahead = bucket(geometry.lookaheads, most) if most else 0

    def admit(self, slot: int) -> None:
        """Nothing is remembered."""

    def choose(self, needs: Mapping[int, Need]) -> Choice:
        """All that fit; the graph runs as long as a slot has room."""
        if not any(need.room for need in needs.values()):
            return NOTHING
        return Choice({slot: need.room for slot, need in needs.items()}, self._lookahead)

    def observe(self, slot: int, drafted: int, accepted: int) -> None:
        """Nothing is remembered."""

    def measure(self, spec: GraphSpec, ms: float) -> None:
        """Nothing is remembered."""


class AdaptiveLookahead:
    """As many drafts as give the most tokens for what they cost."""

    def __init__(self, package: Package, most: int) -> None:
        """At most ``most`` >= 1 drafts a round."""
        self._lookaheads, self._most = package.manifest.geometry.lookaheads, most
        # On a device, a row may round differently among others: drafts may show in greedy text.
        self._bits = package.manifest.backend == "onnxruntime"
        self._meter = Meter(package, most)
        self._nominal = self._meter.nominal()
        self._slots: dict[int, Acceptance] = {}

    def admit(self, slot: int) -> None:
        """Start from the hope that every draft is accepted."""
        self._slots[slot] = Acceptance.hopeful(self._most)

    def observe(self, slot: int, drafted: int, accepted: int) -> None:
        """Move the acceptance of a slot."""
        self._slots[slot].observe(drafted, accepted)

    def measure(self, spec: GraphSpec, ms: float) -> None:
        """Move the cost of a graph."""
        self._meter.add(spec, ms)

    def choose(self, needs: Mapping[int, Need]) -> Choice:
        """Each sampled slot by itself; the greedy ones together, who share the cost of the round.

        A draft graph that has to run anyway runs for all greedy slots.
        """
        drafts, greedy = dict[int, int](), dict[int, int]()
        least = 0
        for slot, need in needs.items():
            if need.given is None and self._bits and not need.sampled:
                greedy[slot] = need.room
                least = max(least, int(need.due))
            elif (count := self._alone(slot, need)) or need.due:
                drafts[slot] = count
                least = max(least, count, 1)
        level = self._together(greedy, drafts, least)
        drafts |= {slot: min(level, room) for slot, room in greedy.items() if level and room}
        if not drafts:
            return NOTHING
        return Choice(drafts, bucket(self._lookaheads, max(drafts.values())))

    def _alone(self, slot: int, need: Need) -> int:
        if need.given is not None:
            return min(need.given, need.room)
        own = self._slots[slot]
        return best(own.expected(need.room), self._nominal, own.rates[0], int(need.due))

    def _together(self, greedy: Mapping[int, int], others: Mapping[int, int], least: int) -> int:
        """Drafts of the greedy slots, of which each takes as many as it has room for."""
        most = max(greedy.values(), default=0)
        if least >= most:
            return most
        for level in range(most, least - 1, -1):
            if self._meter.overdue(level):
                return level
        tokens = [sum(self._slots[s].expected(k)[-1] for s, k in others.items())] * (most + 1)
        for slot, room in greedy.items():
            own = self._slots[slot].expected(room)
            tokens = [sum_ + own[min(k, room)] for k, sum_ in enumerate(tokens)]
        first = sum(self._slots[slot].rates[0] for slot in greedy)
        return best(tokens, self._meter.measured(), first, least)


@dataclass(slots=True)
class Acceptance:
    """How often the drafts of one sequence are accepted, by position.

    Counts fade, so that recent rounds say most. A position of which little is known is taken to
    be like the one before it.

    Attributes:
        hits: By position, accepted drafts.
        tries: By position, drafts that were reached: all before them were accepted.
    """

    hits: list[float]
    tries: list[float]

    @classmethod
    def hopeful(cls, most: int) -> "Acceptance":
        """Of ``most`` >= 1 positions, as if one draft had been seen and accepted."""
        rest = [0.0] * (most - 1)
        return cls([1.0, *rest], [1.0, *rest])

    def observe(self, drafted: int, accepted: int) -> None:
        """Count a round; one without drafts changes nothing."""
        if not drafted:
            return
        fade = 1 - 1 / WINDOW
        self.hits = [hits * fade + (i < accepted) for i, hits in enumerate(self.hits)]
        reached = min(drafted, accepted + 1)
        self.tries = [tries * fade + (i < reached) for i, tries in enumerate(self.tries)]

    @property
    def rates(self) -> list[float]:
        """By position, the chance that a draft is accepted once those before it are."""
        rates = [self.hits[0] / self.tries[0]]
        for hits, tries in zip(self.hits[1:], self.tries[1:], strict=True):
            rates.append((hits + rates[-1]) / (tries + 1))
        return rates

    def expected(self, room: int) -> list[float]:
        """Tokens that a round of k drafts is expected to give, k = 0..``room``."""
        tokens, chance = [1.0], 1.0
        for rate in self.rates[:room]:
            chance *= rate
            tokens.append(tokens[-1] + chance)
        return tokens


def best(tokens: Sequence[float], costs: Costs, first: float, least: int) -> int:
    """The number of drafts that gives most for its cost; of equals the largest.

    Without drafts, the drafter still runs once in P rounds to take in what waits, and its one
    draft is verified in a row that is there anyway. That share belongs to the cost of plain rounds
    and its draft to what they give. With one slot, a first draft so pays where its chance exceeds
    its cost in plain passes.

    Args:
        tokens: Tokens that a round of k drafts is expected to give, k = 0 upwards.
        costs: For at least as many drafts.
        first: Of these, what a first draft is expected to give.
        least: Fewest drafts.
    """

    def rate(drafts: int) -> float:
        if drafts:
            return tokens[drafts] / costs.rounds[drafts]
        share = 1 / costs.backlog
        return (tokens[0] + share * first) / (costs.rounds[0] + share * costs.probe)

    return max(range(least, len(tokens)), key=lambda drafts: (rate(drafts), drafts))
