"""The choice of a number of drafts: what pays is drafted, and only what may decide it does."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_mtp.config import ModelConfig
from qwen_mtp.graphs.signature import graph_specs
from qwen_mtp.graphs.spec import Geometry
from qwen_mtp.runtime.costs import FIRST_REFRESH, REFRESH, Costs, Meter
from qwen_mtp.runtime.lookahead import (
    Acceptance,
    AdaptiveLookahead,
    Choice,
    FixedLookahead,
    Need,
    best,
)
from qwen_mtp.runtime.package import Package
from tests.checkpoints import tiny_config
from tests.packages import scratch

K, P = 3, 4
CHEAP = Costs((1.0, 1.1, 1.35, 1.35), 0.1, P)
# Milliseconds of each graph of a package with K = 1 and 3; plain passes are 100.
MS = {
    "target_verify_r2": 100.0,
    "target_verify_r4": 105.0,
    "mtp_draft_k1": 10.0,
    "mtp_draft_k3": 30.0,
}
DEAR = {name: 20 * ms if name.startswith("mtp") else ms for name, ms in MS.items()}


@cache
def sized(
    slots: int = 1, backend: str = "onnxruntime", lookaheads: tuple[int, ...] = (1, 3)
) -> Package:
    """The tables of a package whose vocabulary head is small beside its layers."""
    path = scratch() / "lookahead"
    path.mkdir(exist_ok=True)
    sizes = tiny_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=12)
    (path / "config.json").write_text(json.dumps(sizes))
    config = ModelConfig.from_checkpoint(path)
    geometry = Geometry(
        max_num_seqs=slots,
        max_model_len=64,
        block_size=16,
        prefill_chunk=8,
        lookaheads=lookaheads,
        format="int8",
    )
    graphs = graph_specs(config, geometry)
    manifest: Any = SimpleNamespace(
        config=config, geometry=geometry, graphs=graphs, backend=backend
    )
    return Package(Path("none"), manifest)


def policy(slots: int = 1, backend: str = "onnxruntime") -> AdaptiveLookahead:
    made = AdaptiveLookahead(sized(slots, backend), K)
    for slot in range(slots):
        made.admit(slot)
    return made


def measured(made: AdaptiveLookahead, ms: dict[str, float], rounds: int = 6) -> AdaptiveLookahead:
    """Tell what every graph takes."""
    for name in sorted(ms) * rounds:
        made.measure(sized().graph(name), ms[name])
    return made


def play(made: AdaptiveLookahead, ms: dict[str, float], accept: list[int]) -> list[int | None]:
    """One greedy slot through rounds in which up to ``accept`` drafts would be accepted.

    Returns:
        The drafts of each round; None where the draft graph did not run.
    """
    waiting, drafts = 1, list[int | None]()
    for right in accept:
        choice = made.choose({0: Need(K, due=waiting >= P)})
        count = choice.drafts.get(0)
        accepted = min(right, count or 0)
        if count is not None:
            made.measure(
                sized().graph(f"mtp_draft_k{choice.lookahead}"),
                ms[f"mtp_draft_k{choice.lookahead}"],
            )
        rows = 2 if (count or 0) < 2 else 4
        made.measure(sized().graph(f"target_verify_r{rows}"), ms[f"target_verify_r{rows}"])
        made.observe(0, count or 0, accepted)
        waiting = (waiting if count is None else 0) + accepted + 1
        assert waiting <= P, "rows were lost"
        drafts.append(count)
    return drafts


def uniform(rate: float) -> list[float]:
    """Tokens of rounds whose drafts are each accepted with one chance."""
    return [sum(rate**i for i in range(k + 1)) for k in range(K + 1)]


@pytest.mark.parametrize("price", [0.05, 0.1, 0.5, 1.0])
def test_a_first_draft_pays_where_its_chance_exceeds_its_cost(price: float) -> None:
    costs = Costs((1.0, 1.0 + price), price, P)
    for chance in (0.0, 0.9 * price, 0.99 * price, 1.01 * price, 1.1 * price):
        assert best([1.0, 1.0 + chance], costs, chance, 0) == (chance > price)


def test_of_equal_choices_the_largest_is_taken() -> None:
    assert best([1.0, 1.5, 1.5, 1.5], Costs((1.0, 1.0, 1.0, 1.0), 0.0, P), 0.0, 0) == 3
    assert best([1.0, 2.0, 4.0], Costs((1.0, 1.0, 2.0), 0.0, P), 0.0, 0) == 2


def test_more_acceptance_never_means_fewer_drafts_and_dearer_drafts_never_more() -> None:
    steps = [i / 50 for i in range(51)]
    choices = [best(uniform(rate), CHEAP, rate, 0) for rate in steps]
    assert choices == sorted(choices)
    assert {0, 1, 3} == {*choices}
    prices = [Costs((1.0, 1 + p, 1.05 + 3 * p, 1.05 + 3 * p), p, P) for p in steps]
    choices = [best(uniform(0.7), costs, 0.7, 0) for costs in prices]
    assert choices == sorted(choices, reverse=True)
    assert {1, 3} <= {*choices}


def test_a_new_sequence_tries_all_drafts_before_anything_is_known() -> None:
    made = policy()
    assert made.choose({0: Need(K)}) == Choice({0: 3}, 3)
    assert made.choose({0: Need(K, sampled=True)}) == Choice({0: 3}, 3)
    assert made.choose({0: Need(2)}) == Choice({0: 2}, 3)
    assert made.choose({0: Need(1)}) == Choice({0: 1}, 1)
    assert made.choose({0: Need(0)}) == Choice({}, 0)


@pytest.mark.parametrize("ms", [MS, DEAR])
def test_where_nothing_is_accepted_the_drafter_runs_once_in_p_rounds(ms: dict[str, float]) -> None:
    drafts = play(policy(), ms, [0] * 400)
    late = drafts[40 : 40 + REFRESH // 2]
    assert {*late} <= {None, 1, 3}
    assert late.count(None) == len(late) * (P - 1) // P
    tries = [count for count in drafts[200:] if count not in (None, 1)]
    assert len(tries) <= 2, "costs are measured again too often"


def test_where_everything_is_accepted_all_drafts_are_proposed() -> None:
    drafts = play(policy(), MS, [K] * 200)
    assert [count for count in drafts if count != K] == [1, 1, 1], "graphs are measured too often"


def test_drafting_comes_back_with_acceptance_and_goes_with_it() -> None:
    drafts = play(policy(), MS, ([0] * 96 + [K] * 96) * 3)
    for start in (96, 288, 480):
        back = drafts[start : start + 96]
        assert back[-32:].count(K) >= 30, back
        gone = drafts[start + 48 - 96 : start]
        assert gone.count(None) >= 30, gone


def test_drafts_that_cost_more_than_they_give_are_given_up_once_that_is_measured() -> None:
    drafts = play(policy(), DEAR, [1] * 100)
    assert drafts[0] == 3
    assert drafts[30:].count(None) >= 45, drafts


def test_a_position_that_is_never_accepted_is_given_up_alone() -> None:
    drafts = play(policy(), MS, [1] * 400)
    assert drafts[100:].count(1) >= 260, drafts


def test_a_slow_run_and_the_first_run_of_a_graph_count_for_nothing() -> None:
    meter, graph = Meter(sized(), K), sized().graph("target_verify_r2")
    meter.add(graph, 900.0)
    assert meter.measured() == meter.nominal()
    for ms in (100.0, 101.0, 700.0, 99.0, 100.0):
        meter.add(graph, ms)
    assert meter.measured().rounds[0] == 100.0


def test_a_cost_that_was_not_measured_is_in_proportion_to_one_that_was() -> None:
    meter = Meter(sized(), K)
    nominal = meter.nominal()
    for _ in range(2):
        meter.add(sized().graph("target_verify_r2"), 50.0 * nominal.rounds[0])
    found = meter.measured()
    assert found.rounds == pytest.approx([50.0 * cost for cost in nominal.rounds])
    assert found.probe == pytest.approx(50.0 * nominal.probe)


def test_graphs_are_measured_when_a_while_has_passed() -> None:
    meter, rows2, rows4 = (
        Meter(sized(), K),
        *map(sized().graph, ("target_verify_r2", "target_verify_r4")),
    )
    found = []
    for _ in range(FIRST_REFRESH + 2 * REFRESH):
        meter.add(rows4, 1.0)
        found.append(meter.overdue(0))
        if found[-1]:
            meter.add(rows2, 1.0)
    # the first run does not count, and each pass is a round
    assert [i for i, overdue in enumerate(found) if overdue] == [15, 16, 144]


def test_a_smaller_drafting_head_makes_nominal_drafts_cheaper_and_rows_cost_little() -> None:
    small, wide = (Meter(sized(slots), K).nominal() for slots in (1, 8))
    plain, one, two, three = small.rounds
    assert plain < one < two == three < 2 * plain
    assert three - plain > 2.9 * small.probe
    assert wide.rounds[3] > small.rounds[3]


def test_greedy_slots_share_what_a_round_costs() -> None:
    """Two slots are hopeless; a third one for which drafts pay makes them free for all."""
    made = measured(policy(3), MS)
    for _ in range(60):
        made.observe(0, K, 0)
        made.observe(1, K, 0)
    assert made.choose({0: Need(K), 1: Need(K)}) == Choice({}, 0)
    for _ in range(60):
        made.observe(2, K, K)
    assert made.choose({s: Need(K) for s in range(3)}) == Choice({0: 3, 1: 3, 2: 3}, 3)
    assert made.choose({0: Need(K), 1: Need(1), 2: Need(0)}) == Choice({}, 0)
    assert made.choose({0: Need(K, due=True), 1: Need(1), 2: Need(0)}) == Choice({0: 1, 1: 1}, 1)


def test_given_drafts_win_and_a_drafter_that_is_due_runs_without_them() -> None:
    made = measured(policy(2), MS)
    assert made.choose({0: Need(K, given=0)}) == Choice({}, 0)
    assert made.choose({0: Need(K, due=True, given=0)}) == Choice({0: 0}, 1)
    assert made.choose({0: Need(K, given=2)}) == Choice({0: 2}, 3)
    assert made.choose({0: Need(1, given=3)}) == Choice({0: 1}, 1)
    for _ in range(60):
        made.observe(1, K, 0)
    assert made.choose({0: Need(K, given=1), 1: Need(K)}) == Choice({0: 1, 1: 1}, 1)


ROUNDS = st.lists(st.tuples(st.integers(0, K), st.integers(0, K)), max_size=40)
TIMES = st.dictionaries(st.sampled_from(sorted(MS)), st.floats(0.01, 1e4))


@settings(max_examples=60, deadline=None)
@given(mine=ROUNDS, others=ROUNDS, ms=TIMES, due=st.booleans(), room=st.integers(1, K), k=ROUNDS)
def test_what_a_sampled_slot_drafts_depends_on_its_own_history_alone(
    mine: Any, others: Any, ms: Any, due: bool, room: int, k: Any
) -> None:
    need = Need(room, due=due, sampled=True)
    alone, among = policy(2), measured(policy(2), ms)
    for made in (alone, among):
        for drafted, accepted in mine:
            made.observe(0, drafted, min(drafted, accepted))
    for drafted, accepted in others:
        among.observe(1, drafted, min(drafted, accepted))
    expected = alone.choose({0: need}).drafts.get(0)
    for other in (Need(K), Need(K, due=True), Need(K, sampled=True), Need(K, given=2)):
        assert among.choose({0: need, 1: other}).drafts.get(0) == expected
        assert among.choose({0: need, 1: other}) == among.choose({0: need, 1: other})


def test_on_a_device_greedy_slots_do_not_look_at_times_either() -> None:
    """There, bits of a row may depend on the others: a text would depend on the clock."""
    need = {0: Need(K)}
    on_cpu, on_device = (
        measured(policy(1, backend), DEAR) for backend in ("onnxruntime", "ascend")
    )
    for made in (on_cpu, on_device):
        for _ in range(8):
            made.observe(0, K, 1)
    assert on_cpu.choose(need) == Choice({}, 0)
    unmeasured = policy(1, "ascend")
    for _ in range(8):
        unmeasured.observe(0, K, 1)
    assert on_device.choose(need) == unmeasured.choose(need) != Choice({}, 0)


def test_acceptance_follows_the_last_rounds_and_guesses_what_it_has_not_seen() -> None:
    found = Acceptance.hopeful(K)
    assert found.expected(K) == [1, 2, 3, 4]
    found.observe(0, 0)
    assert found.rates == [1, 1, 1]
    for _ in range(200):
        found.observe(K, 1)
    assert found.rates[0] > 0.99
    assert found.rates[1] < 0.05
    for _ in range(200):
        found.observe(1, 1)
    assert found.rates[1] > 0.9, "what was seen long ago is forgotten"
    for _ in range(200):
        found.observe(1, 0)
    assert max(found.rates) < 0.01


def test_a_fixed_number_of_drafts_is_what_fits_for_all_slots() -> None:
    fixed = FixedLookahead(sized().manifest.geometry, 2)
    assert fixed.choose({0: Need(2), 1: Need(0), 2: Need(1, given=0)}) == Choice(
        {0: 2, 1: 0, 2: 1}, 3
    )
    assert fixed.choose({0: Need(0)}) == Choice({}, 0)
    assert FixedLookahead(sized().manifest.geometry, 0).choose({0: Need(0)}) == Choice({}, 0)
