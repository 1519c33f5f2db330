"""The sampler inside a GE graph says what its meaning says, case by case."""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen_mtp.custom_ops.torch_library import ops
from qwen_mtp.export.air import convert, decompose
from qwen_mtp.export.air_passes import Interface, finish
from qwen_mtp.ge.interpreter import Interpreter
from qwen_mtp.graphs.spec import AscendChoice, GraphSpec, TensorSpec
from tests.ge_graphs import needs_wheel
from tests.rejection_graphs import INTEGERS, SHAPES, Feeds
from tests.rejection_slots import Form, differing, slot_case

pytestmark = needs_wheel
SLOTS, STOPS = 8, 3
SIZES = [(2, 7), (3, 1025), (7, 200)]  # drafts, vocabulary
KERNEL = "MtpRejectionSample"
CASES = 2000


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Small products on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Sampler(torch.nn.Module):
    """Nothing but the operator."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ops.rejection_sample(*inputs))


def signature(drafts: int, vocabulary: int) -> GraphSpec:
    sizes = {"B": SLOTS, "R": drafts + 1, "K": drafts, "V": vocabulary, "S": STOPS}
    inputs = tuple(
        TensorSpec(
            name, "int32" if name in INTEGERS else "float32", tuple(sizes[d] for d in SHAPES[name])
        )
        for name in SHAPES
        if name != "draft_probs"
    )
    outputs = (
        TensorSpec("tokens", "int32", (SLOTS, drafts + 1)),
        TensorSpec("accepted", "int32", (SLOTS,)),
    )
    return GraphSpec("sampler", "target_verify", drafts + 1, 0, inputs, outputs)


@cache
def interpreter(drafts: int, vocabulary: int, custom_ops: tuple[str, ...]) -> Interpreter:
    spec = signature(drafts, vocabulary)
    choice = AscendChoice(lowering="portable", soc_version="Ascend910B4", custom_ops=custom_ops)
    with FakeTensorMode():
        fakes = tuple(torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in spec.inputs)
        program = torch.export.export(Sampler(), fakes, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and torchair warn of their own code
        converted = convert(decompose(program, choice))
    model = finish(converted.model, Interface(spec, [], converted.used, "weights"))
    assert (KERNEL in {op.type for op in model.graph[0].op}) == bool(custom_ops)
    return Interpreter(model, _no_weights, ["tokens", "accepted"])


def _no_weights(path: str, *_: Any) -> Any:
    raise AssertionError(f"{path}: a sampler has no weights")


def form(drafts: int, vocabulary: int, custom_ops: tuple[str, ...] = ()) -> Form:
    """The graph in the place of the operator."""

    def run(**feeds: torch.Tensor) -> Any:
        found = interpreter(drafts, vocabulary, custom_ops).run(feeds)
        return found["tokens"], found["accepted"]

    return run


def cases(drafts: int, vocabulary: int, count: int) -> list[Feeds]:
    """Batches of one number of drafts: the random ones have it by chance."""
    rng, found = np.random.default_rng([drafts, vocabulary]), list[Feeds]()
    while len(found) < count:
        feeds = slot_case(rng, SLOTS, vocabulary, laws=False)
        if feeds["draft_ids"].shape[1] == drafts:
            found.append(feeds)
    return found


@pytest.mark.parametrize(
    ("custom_ops", "sizes"),
    [((), SIZES), ((KERNEL,), SIZES[1:2])],
    ids=["operators", "kernel"],
)
def test_the_sampler_of_a_graph_says_what_the_meaning_says(
    custom_ops: tuple[str, ...], sizes: list[tuple[int, int]]
) -> None:
    slots, found = 0, []
    for drafts, vocabulary in sizes:
        batches = cases(drafts, vocabulary, -(-CASES // (SLOTS * len(sizes))))
        sampler = form(drafts, vocabulary, custom_ops)
        for feeds in batches:
            found += differing(sampler, feeds)
            slots += SLOTS
    assert slots >= CASES
    assert all(explained for _, explained in found), found
    assert len(found) < 1e-3 * slots


def test_a_slot_without_numbers_says_so_and_leaves_its_neighbours_alone() -> None:
    feeds = cases(3, 1025, 1)[0]
    feeds["num_drafts"][:] = 3
    sampler = form(3, 1025)
    wanted = [x.numpy() for x in _run(sampler, feeds)]
    feeds["logits"][2] = np.nan
    tokens, accepted = (x.numpy() for x in _run(sampler, feeds))
    others = np.arange(SLOTS) != 2
    assert (tokens[2] == -1).all()
    assert accepted[2] == 0
    np.testing.assert_array_equal(tokens[others], wanted[0][others])
    np.testing.assert_array_equal(accepted[others], wanted[1][others])


def _run(sampler: Form, feeds: Feeds) -> Any:
    return sampler(**{name: torch.from_numpy(a) for name, a in feeds.items()})
