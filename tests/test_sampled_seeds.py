"""A sampled text depends on its seed alone, not on the batch it is in."""

from itertools import cycle
from typing import Any

import numpy as np
import pytest

from qwen_mtp.graphs.spec import GraphSpec
from qwen_mtp.runtime import feeds
from qwen_mtp.runtime.costs import Costs, Meter
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.lookahead import AdaptiveLookahead
from qwen_mtp.runtime.randomness import Purpose
from qwen_mtp.runtime.sampling import ResolvedSampling
from qwen_mtp.runtime.session import Session
from tests.packages import TRAINED
from tests.sampled import Ask, engine, prompt, trained

pytestmark = pytest.mark.skipif(
    not (TRAINED / "model.safetensors").is_file(), reason="not trained here"
)
MINE = (Ask(1.0), Ask(0.8, top_p=0.9), Ask(2.0, top_k=30))
NEIGHBOURS = [Ask(2.0), Ask(0.0), Ask(1.0, top_k=5), Ask(1.5, top_p=0.6), Ask(0.7)]


def text(
    mine: ResolvedSampling,
    place: int,
    company: int,
    slots: int,
    format: str,
    adaptive: bool = False,
) -> list[Any]:
    """20 tokens and the counts of a request in slot ``place``; neighbours come and go.

    The counts are the accepted and the proposed drafts of each round.
    """
    package = trained(format, slots)
    session = Session(package, engine=engine(format, slots), adaptive=adaptive)
    others = cycle(enumerate(NEIGHBOURS))

    def join() -> None:
        number, ask = next(others)
        session.prefill(prompt()[: 3 + number], ask.resolve(900 + number))

    for _ in range(place):
        join()
    slot, token = session.prefill(prompt(), mine)
    assert slot == place
    for _ in range(company - place):
        join()
    tokens, accepted, drafted = [token], [], []
    while len(tokens) < 20:
        for other, result in session.step().items():
            if other == slot:
                tokens += result.tokens
                accepted.append(result.accepted)
                drafted.append(result.drafted)
            elif session.context_len(other) > 14:
                session.release(other)
                join()
    for other in range(slots):
        session.release(other)
    return [tokens[:20], accepted, drafted]


def texts(
    ask: Ask, slots: int = 16, format: str = "fp32", adaptive: bool = False
) -> list[list[Any]]:
    """One seed alone, then among three others in the first and in the last slot, and so on."""
    places = [(0, 0), (0, 3), (3, 3), (9, 12)] if slots == 16 else [(0, 0), (slots - 1, slots - 1)]
    mine = ask.resolve(2**63 + 5)
    return [text(mine, *place, slots, format, adaptive) for place in places]


@pytest.mark.parametrize("ask", MINE)
def test_a_text_depends_on_its_seed_alone(ask: Ask) -> None:
    alone, *among = texts(ask)
    assert [alone] * 3 == among
    assert text(ask.resolve(5), 0, 0, 16, "fp32") != alone


@pytest.fixture
def unsteady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs seem to take anything."""
    real, draw = Meter.add, np.random.default_rng(0)

    def add(self: Meter, spec: GraphSpec, ms: float) -> None:
        real(self, spec, 10 ** draw.uniform(-2, 2))

    monkeypatch.setattr(Meter, "add", add)


@pytest.mark.usefixtures("unsteady")
@pytest.mark.parametrize("ask", MINE[:2])
def test_a_text_depends_on_its_seed_alone_where_the_number_of_drafts_adapts(ask: Ask) -> None:
    """Whatever a machine takes for its graphs, and whatever the neighbours draft."""
    alone, *among = texts(ask, adaptive=True)
    assert [alone] * 3 == among
    assert len({*alone[2]}) > 1, "nothing was chosen"


@pytest.mark.usefixtures("unsteady")
def test_the_seed_check_fails_a_choice_that_looks_at_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AdaptiveLookahead, "_nominal", property(_measured, _ignore), raising=False)
    alone, *among = texts(MINE[0], adaptive=True)
    assert any(other != alone for other in among)


def _measured(policy: AdaptiveLookahead) -> Costs:
    return policy._meter.measured()


def _ignore(policy: AdaptiveLookahead, costs: Costs) -> None:
    """The nominal costs are not kept."""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("ask", MINE)
def test_a_text_does_not_depend_on_the_number_of_slots_of_the_package(
    ask: Ask, format: str
) -> None:
    found = [t for slots in (1, 4, 16) for t in texts(ask, slots, format)]
    assert found == [found[0]] * len(found)


def _of_the_neighbour(accept: Any, pick: Any) -> None:
    accept[:], pick[:] = np.roll(accept, 1, 0), np.roll(pick, 1, 0)


def test_the_seed_check_fails_uniforms_of_the_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    real = feeds.feed_verify

    def fed(engine: Engine, graph: str, *args: Any) -> None:
        real(engine, graph, *args)
        _of_the_neighbour(*(engine.buffer(graph, f"{n}_uniforms") for n in ("accept", "pick")))

    monkeypatch.setattr("qwen_mtp.runtime.session.feed_verify", fed)
    alone, *among = texts(MINE[0])
    assert all(other != alone for other in among)


def test_the_seed_check_fails_a_generator_that_all_requests_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = np.random.default_rng(0)

    def draw(seed: int, places: Any, purpose: Purpose) -> Any:
        return shared.random(places.shape, np.float32)

    monkeypatch.setattr(feeds, "uniforms", draw)
    alone, *among = texts(MINE[0])
    assert all(other != alone for other in among)
