"""Drafts from a part of the vocabulary: the same text and law, whatever the part is."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from qwen_mtp.draft_vocabulary import choose_draft_ids
from qwen_mtp.export.blueprint import Blueprint
from qwen_mtp.export.checkpoint import Checkpoint
from qwen_mtp.export.package import write_package
from qwen_mtp.export.plan import plan_export
from qwen_mtp.export.weights import load_weights
from qwen_mtp.graphs.spec import Geometry, WeightFormat
from qwen_mtp.progress import Silent
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.package import Package
from tests import sampled
from tests.commands import contents
from tests.packages import TRAINED, Ids, package, random_checkpoint, random_part, two_layers
from tests.rounds import EagerGraphs
from tests.sampled import SLOTS
from tests.sampled_law import ASKS, fresh_runs, misfits
from tests.scripted import (
    Track,
    advance,
    begin,
    counts,
    differences,
    nothing,
    own,
    scripted,
    session,
    solo,
)

K, LENGTH = 3, 30
GRAPH = f"mtp_draft_k{K}"
PROMPTS = ([5, 6, 7], [100, 2], [*range(40, 60)])


@cache
def trained_part() -> tuple[Ids, Package]:
    """A quarter of the vocabulary, for a head that drafts well, as many slots as runs of a law."""
    ids = choose_draft_ids(TRAINED, Checkpoint.open(TRAINED).config, 512, None)
    return ids, package(
        TRAINED, max_num_seqs=SLOTS, max_model_len=64, format="int8", draft_ids=ids
    )


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one run of a draft graph gave: ids ``[K]`` and logits ``[K, N]``."""

    ids: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]


def followed(of: Package, prompt: Sequence[int]) -> tuple[Track, list[Drafted]]:
    """A text with all that the head drafted on the way."""
    running = session(of, K)
    track, drafted = begin(running, Track(prompt, own)), []
    while len(track.tokens) < LENGTH:
        advance(running, [track])
        ids, *rows = (
            running.engine.buffer(GRAPH, name)[track.slot].copy()
            for name in ("draft_ids", *(f"draft_logits.{j}" for j in range(K)))
        )
        drafted.append(Drafted(ids, np.stack(rows)))
    running.release(track.slot)
    return track, drafted


@pytest.mark.parametrize("format", ["int8", "int4", "fp32"])
def test_the_text_has_the_bits_of_plain_decoding_whatever_the_part(format: str) -> None:
    """A quarter of a trained vocabulary; all but two, or three, of a random one."""
    counted = {"int4": 254, "fp32": 3}
    ids, small = random_part(format, counted[format]) if format in counted else trained_part()
    truths = [solo(session(small, 0), prompt, nothing, LENGTH + K + 1) for prompt in PROMPTS]
    accepted: Counter[int] = Counter()
    for truth in truths:
        track, drafted = followed(small, truth.prompt)
        assert differences(truth, track, LENGTH) == []
        accepted.update(track.accepted)
        for drafts in drafted:
            assert drafts.logits.shape == (K, len(ids))
            assert drafts.ids.tolist() == [ids[n] for n in drafts.logits.argmax(axis=1)]
    print(f"{format}, {len(ids)} tokens, accepted: {sorted(accepted.items())}")
    assert {0, K} < {*accepted} or format in counted, "trained, the head is of use"
    vocabulary = small.manifest.config.vocab_size
    forced = scripted(session(small, K), truths, LENGTH, counts(K), vocabulary)
    for truth, track in zip(truths, forced, strict=True):
        assert differences(truth, track, LENGTH) == []
    assert {a for track in forced for a in track.accepted} == {*range(K + 1)}


def test_sampled_text_has_the_targets_law(monkeypatch: pytest.MonkeyPatch) -> None:
    small = trained_part()[1]
    engine = Engine(small, threads=1, keep_logits=True)
    monkeypatch.setattr(sampled, "engine", lambda *_: engine)
    monkeypatch.setattr(sampled, "trained", lambda *_: small)
    runs = fresh_runs(sampled.K, 5, 60, ASKS[1:5])
    assert all(sampled.histogram(runs))
    assert misfits(runs, "a part") == {}


def test_the_whole_vocabulary_as_a_part_drafts_the_same() -> None:
    both = [package(two_layers(), max_model_len=64), random_part("fp32", 256)[1]]
    (track, drafted), (twin, copied) = (followed(each, PROMPTS[0]) for each in both)
    assert differences(track, twin, LENGTH) == []
    assert track.accepted == twin.accepted
    for a, b in zip(drafted, copied, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.logits, b.logits)


@pytest.mark.parametrize("format", ["fp32", "int8", "int4"])
def test_drafts_are_the_best_of_the_part_by_the_logits_of_the_whole_head(format: Any) -> None:
    ids = tuple(range(1, 256, 3))
    found = []
    for chosen in ((), ids):
        graphs = EagerGraphs(two_layers(), geometry(format, len(chosen)), draft_ids=chosen)
        hidden = graphs.prefill([*range(20)])["hidden"][0]
        found.append({k: v.numpy() for k, v in graphs.draft(7, hidden, 19).items()})
    whole, cut = found
    best = whole["draft_logits.0"][:, list(ids)]
    np.testing.assert_allclose(cut["draft_logits.0"], best, rtol=1e-6, atol=1e-7)
    assert cut["draft_ids"][0, 0] == ids[int(best.argmax())]


def test_of_equal_logits_the_lowest_id_is_drafted() -> None:
    graphs = EagerGraphs(two_layers(), geometry("int8", 3), draft_ids=(9, 40, 200))
    head, vocabulary = graphs.model.mtp, graphs.model.target.vocabulary
    assert head is not None
    _, ids = head.propose(vocabulary, torch.zeros(2, 64))
    assert ids.tolist() == [9, 9]


def geometry(format: WeightFormat, count: int, **changes: Any) -> Geometry:
    return Geometry(
        max_num_seqs=1,
        max_model_len=64,
        block_size=16,
        prefill_chunk=16,
        lookaheads=(K,),
        format=format,
        draft_vocab=count,
        **changes,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", ["fp32", "int8", "int4", "bf16", "int4 in slots"])
def test_stored_rows_are_those_of_the_head(format: str, tied: bool) -> None:
    model = random_checkpoint(num_hidden_layers=1, full_attention_interval=1,
                              tie_word_embeddings=tied)  # fmt: skip
    source, ids = Checkpoint.open(model), (0, 3, 17, 18, 200, 255)
    kind: Any = format.split(" ")[0]
    changes: dict[str, Any] = {}
    if kind == "bf16" or " " in format:
        changes = {"layout": "slots", "dtype": "bfloat16"}
    plan = Blueprint(source.config, geometry(kind, len(ids), **changes), draft_ids=ids)
    names = ("target.vocabulary.head", "mtp.draft")
    groups = [g for g in plan.groups if g.params[0].startswith(names)]
    stored = load_weights(source, groups, plan.stored)
    assert stored["mtp.draft.ids"].tolist() == list(ids)
    for name in ("weight", "scale"):
        own_rows = stored.get(f"mtp.draft.head.{name}")
        if own_rows is not None:
            whole = stored[f"target.vocabulary.head.{name}"]
            whole = whole if len(whole) == source.config.vocab_size else whole.T
            np.testing.assert_array_equal(own_rows, whole[list(ids)])
    assert ("mtp.draft.head.scale" in stored) == (kind in ("int8", "int4"))


def test_ids_of_a_package_give_the_same_package_again(tmp_path: Path) -> None:
    chosen, first = random_part("int4", 254)
    ids = first.draft_ids()
    assert tuple(ids.tolist()) == chosen
    plan = plan_export(two_layers(), first.manifest.geometry, draft_ids=ids.tolist())
    write_package(plan, tmp_path, Silent())
    assert contents(tmp_path) == contents(first.directory)
