"""Models loaded once, and short names for what is asked of them and what comes back."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qwen_mtp.runtime.llm import LLM
from qwen_mtp.runtime.outputs import Delta, RequestOutput
from qwen_mtp.runtime.sampling import SamplingParams
from qwen_mtp.runtime.session import Proposals, Session, StepResult

K = 3
PROMPT = [5, 6, 7]
PROMPTS = [[5, 6, 7], [300, 2], list(range(40, 60)), [9], [1000, 1001, 1002, 1003]]
LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@cache
def loaded(package: Path) -> LLM:
    """One model a package; nobody closes it."""
    return LLM(package, threads=1)


def tokens(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def texts(outputs: Sequence[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def reason(output: RequestOutput) -> tuple[Any, Any]:
    return output.outputs[0].finish_reason, output.outputs[0].stop_reason


def greedy(**changes: Any) -> SamplingParams:
    return dataclasses.replace(LONG, **changes)


def session_of(llm: LLM) -> Session:
    assert llm._session is not None
    return llm._session


def with_manifest(patch: pytest.MonkeyPatch, llm: LLM, **changes: Any) -> None:
    manifest = msgspec.structs.replace(llm.package.manifest, **changes)
    patch.setattr(llm, "package", dataclasses.replace(llm.package, manifest=manifest))


def accept_all(patch: pytest.MonkeyPatch, truth: Sequence[int]) -> list[int]:
    """Make every draft the true next token, so that a round commits K + 1.

    Returns:
        The number of tokens of each round, as they come.
    """
    real, sizes = Session.step, []

    def step(self: Session, drafts: Proposals | None = None) -> dict[int, StepResult]:
        given = {}
        for slot, sequence in self._slots.items():
            given[slot] = truth[sequence.emitted : sequence.emitted + K]
        results = real(self, given)
        sizes.extend(len(result.tokens) for result in results.values())
        return results

    patch.setattr(Session, "step", step)
    return sizes


def first_seen(truth: Sequence[int], places: Sequence[int]) -> list[int]:
    """Places whose token does not occur before."""
    return [i for i in places if truth[i] not in truth[:i]]


def joined(deltas: Sequence[Delta], index: int = 0) -> tuple[tuple[int, ...], str]:
    own = [delta for delta in deltas if delta.index == index]
    return tuple(t for d in own for t in d.token_ids), "".join(delta.text for delta in own)
