"""The form in aten operators against the meaning, slot by slot, and the law it samples from."""

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from qwen_mtp.custom_ops import rejection_aten
from qwen_mtp.custom_ops.rejection import REJECTION_SAMPLE, REJECTION_SAMPLE_LAWS
from tests.rejection_graphs import random_case, uniform_batch
from tests.rejection_law import LARGE, SCENARIOS, law_error
from tests.rejection_slots import Form, differing, exact_cases, run, slot_case, step

SIZES = (2, 3, 7, 16, 17, 60, 200, 1000, 1025, 3001, 5000)
PROMOTING = {"add", "sub", "mul", "div", "eq", "lt", "le", "gt", "ge", "minimum", "maximum"}
FORBIDDEN = {"index_put", "cumprod", "amax", "all", "unfold", "nonzero", "isin", "rand"}


@pytest.mark.parametrize("laws", [False, True])
def test_the_form_says_what_the_meaning_says_slot_for_slot(laws: bool) -> None:
    rng, slots, found = np.random.default_rng([7, laws]), 0, []
    for v in SIZES:
        for _ in range(12):
            feeds = slot_case(rng, 8, v, laws)
            found += differing(rejection_aten.decomposed, feeds)
            slots += 8
    assert slots >= 1000
    assert all(explained for _, explained in found), found
    assert len(found) < 1e-3 * slots


def test_boundaries_that_float32_hits_exactly_go_where_the_meaning_says() -> None:
    assert not [d for feeds in exact_cases() for d in differing(rejection_aten.decomposed, feeds)]


def test_a_large_vocabulary_is_walked_to_float32_precision() -> None:
    rng, v = np.random.default_rng(3), 248_320
    for ask in [(1.0, 0, 1.0), (1.5, 0, 0.9), (1.0, 1000, 0.99)]:
        feeds = uniform_batch(rng.standard_normal((2, 2, v)), rng, *ask)
        feeds["pick_uniforms"][:] = 1 - 10.0 ** rng.uniform(-7, 0, (2, 2))
        assert all(explained for _, explained in differing(rejection_aten.decomposed, feeds))


@pytest.mark.parametrize("scenario", SCENARIOS + LARGE, ids=str)
def test_the_law_of_the_form_is_the_targets_law(scenario: Any) -> None:
    assert law_error(step(rejection_aten.decomposed), scenario) <= 1e-6


@pytest.mark.parametrize("laws", [False, True])
def test_a_slot_does_not_see_its_neighbours_nor_the_rows_after_its_own(laws: bool) -> None:
    rng = np.random.default_rng(5)
    for v in (7, 200, 1025):
        feeds = random_case(rng, 6, 3, v, laws)
        alone = [
            run(rejection_aten.decomposed, {n: a[b : b + 1].copy() for n, a in feeds.items()})
            for b in range(6)
        ]
        for b, count in enumerate(feeds["num_drafts"]):
            feeds["logits"][b, count + 1 :] = rng.choice([np.nan, np.inf, -np.inf], (3 - count, v))
        feeds["logits"][5] = np.nan
        tokens, accepted = run(rejection_aten.decomposed, feeds)
        for b in range(5):
            np.testing.assert_array_equal(tokens[b], alone[b][0][0])
            assert accepted[b] == alone[b][1][0]


def test_no_stop_ids_at_all_and_a_broken_draft_law_are_served() -> None:
    rng = np.random.default_rng(2)
    feeds = random_case(rng, 8, 2, 30, laws=True)
    feeds["stop_ids"] = np.zeros((8, 0), np.int32)
    assert not differing(rejection_aten.decomposed, feeds)
    feeds["draft_probs"][:4, :, 3] = np.nan
    assert not differing(rejection_aten.decomposed, feeds)


def test_ids_and_uniforms_out_of_range_stay_inside_the_vocabulary() -> None:
    feeds = random_case(np.random.default_rng(4), 8, 3, 30, laws=True)
    feeds["draft_ids"][:] = np.array([-7, 30, 10**9], np.int32)
    feeds["stop_ids"][:, 0], feeds["num_drafts"][:] = 10**9, 100
    assert not differing(rejection_aten.decomposed, feeds)
    for name in ("accept_uniforms", "pick_uniforms"):
        feeds[name][:] = 1
    tokens, _ = run(rejection_aten.decomposed, feeds)
    assert ((tokens >= -1) & (tokens < 30)).all()


@pytest.mark.parametrize(
    "operator", [REJECTION_SAMPLE, REJECTION_SAMPLE_LAWS], ids=lambda o: o.name
)
def test_the_form_is_a_few_aten_operators_without_float64_control_flow_or_promotion(
    operator: Any,
) -> None:
    feeds = random_case(np.random.default_rng(0), 2, 3, 5000, operator is REJECTION_SAMPLE_LAWS)
    args = tuple(torch.from_numpy(a) for a in feeds.values())
    graph = make_fx(lambda *a: operator.decomposed(*a), tracing_mode="fake")(*args).graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    calls = [n for n in nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert len(nodes) - len(calls) == 4  # outputs of max and sort
    assert {n.target.namespace for n in calls} == {"aten"}
    assert not {n.target._opname for n in calls} & FORBIDDEN
    assert sum(n.target._opname == "sort" for n in calls) == 1
    assert not [n for n in calls if "float64" in str(n.meta["val"])]
    for node in (n for n in calls if n.target._opname in PROMOTING):
        assert len({x.meta["val"].dtype for x in node.all_input_nodes}) == 1, node
    assert len(calls) < 240


MUTANTS = {
    "accepts at equality": ("d.uniforms.lt(target)", "d.uniforms.le(target)"),
    "accepts at equality, with laws": ("(d.uniforms * d.law).lt(", "(d.uniforms * d.law).le("),
    "a law without the draft accepts it": ("d.law.gt(0)", "d.law.ge(0)"),
    "the residual is not clamped": (".maximum(torch.zeros((1, 1)))", ""),
    "an empty residual is drawn from": ("total.gt(0)", "total.ge(0)"),
    "the draft stays in its residual": ("ids.eq(draft), zero", "ids.eq(-2), zero"),
    "the residual outlives the drafts": ("torch.where(draft.ge(0), mass, zero)", "mass"),
    "the bonus row is the last draft's": ("view(row.shape) + row)", "view(row.shape) + row - 1)"),
    "top-p keeps what reaches it": ("top_p * total, torch.lt", "top_p * total, torch.le"),
    "a draw stops at the boundary": ("point, torch.le", "point, torch.lt"),
    "ties end one early": ("ids.le(r.ids", "ids.lt(r.ids"),
    "top-k keeps one less": ("top_k.long() - 1", "top_k.long() - 2"),
    "top-k keeps one more": ("(top_k.long() - 1)", "top_k.long()"),
    "bans one row more": ("place.lt(banned_rows", "place.le(banned_rows"),
    "absent stop ids ban": ("torch.full((1, 1, 1), size), ids)", "torch.full((1, 1, 1), 0), ids)"),
    "verifies one draft more": ("place.lt(num_drafts", "place.le(num_drafts"),
    "chunks start at zero": ("(point - before)", "point"),
    "lost in the last chunk": ("sums[:, -1:]", "sums[:, -2:-1]"),
    "a row without a law draws": ("torch.where(r.lawless.gather(1, count), none, token)", "token"),
    "the law of the first row": ("row.clamp(max=drafts - 1)", "row.clamp(max=0)"),
    "the law in vocabulary order": ("return law.gather(1, ids)", "return law"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_form_with_one_thing_wrong_is_found_out(name: str) -> None:
    source = Path(rejection_aten.__file__).read_text(encoding="utf-8")
    assert source.count(MUTANTS[name][0]) == 1
    module = ModuleType("mutant")
    exec(source.replace(*MUTANTS[name]), module.__dict__)
    assert _caught(module.decomposed)


def _caught(form: Form) -> bool:
    rng = np.random.default_rng(9)
    try:
        if any(differing(form, feeds) for feeds in exact_cases()):
            return True
        for laws, v in itertools.product((False, True), (7, 60, 200)):
            for _ in range(3):
                if any(
                    not explained for _, explained in differing(form, slot_case(rng, 8, v, laws))
                ):
                    return True
        return max(law_error(step(form), s) for s in SCENARIOS) > 1e-6
    except (RuntimeError, IndexError):  # an index left its tensor
        return True


def test_the_searches_for_mutants_pass_the_form_itself() -> None:
    assert not _caught(rejection_aten.decomposed)
