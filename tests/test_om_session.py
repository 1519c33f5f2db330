"""The whole loop over offline models: the torch modules behind AscendCL's stand-in."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from qwen_mtp.graphs.spec import Layout
from qwen_mtp.runtime.om import OM_DIRECTORY, OmEngine
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import ResolvedSampling, SamplingParams
from qwen_mtp.runtime.session import Session
from tests.om_packages import in_layout, in_place, module_acl
from tests.packages import package, random_checkpoint
from tests.scripted import GREEDY, random_prompts

K = 3
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3, max_tokens=None).resolve()
# What a package lets change in place, from none to all that Ascend's fused operators do.
IN_PLACE = ((), ("kv", "mtp_kv"), ("kv", "mtp_kv", "conv", "ssm"))


def exported() -> Package:
    return package(random_checkpoint(), max_num_seqs=2, max_model_len=96, lookaheads=(K,))


@dataclass(slots=True)
class Story:
    """What a session said: tokens of three requests, and of each round counts and drafts."""

    first: list[int]
    second: list[int]
    third: list[int] = field(default_factory=list)
    accepted: list[tuple[int, int]] = field(default_factory=list)
    drafts: list[list[list[int]]] = field(default_factory=list)


def tell(session: Session, future: Sequence[int]) -> Story:
    """Two slots side by side, the second of them given up and taken again.

    The drafts for the first are taken from ``future``, its continuation as far as it is known,
    with one wrong token so that every count of accepted drafts comes up; all others are the
    head's own.
    """
    prompts = random_prompts((21, 5, 16))
    story = Story([begin(session, 0, prompts[0])], [begin(session, 1, prompts[1])])
    for number, right in enumerate((3, 0, 2, 1, 3, 3, 0)):
        if number == 4:
            session.release(1)
            story.third.append(begin(session, 1, prompts[2], SAMPLED))
        done = len(story.first)
        drafts = [*future[done : done + K]]
        if right < len(drafts):
            drafts[right] = (drafts[right] + 1) % 256
        results = session.step({0: drafts} if drafts and number != 5 else None)
        story.first += results[0].tokens
        (story.third or story.second).extend(results[1].tokens)
        story.accepted.append((results[0].accepted, results[1].accepted))
        story.drafts.append(session.engine.buffer(f"mtp_draft_k{K}", "draft_ids").tolist())
    return story


def begin(
    session: Session, slot: int, prompt: Sequence[int], sampling: ResolvedSampling = GREEDY
) -> int:
    found, token = session.prefill(prompt, sampling)
    assert found == slot
    return token


@pytest.fixture(scope="module")
def truth() -> tuple[list[int], Story]:
    """The continuation of the first prompt, and the story as ONNX Runtime tells it."""
    session = Session(exported(), threads=1)
    future = tell(session, ()).first
    while len(future) < 40:
        future += session.step()[0].tokens
    return future, tell(Session(exported(), threads=1), future)


def check(made: Package, truth: tuple[list[int], Story], directory: Path) -> None:
    future, expected = truth
    acl = module_acl(made, random_checkpoint(), directory)
    with OmEngine(made, directory, acl=acl) as engine:
        found = tell(Session(made, engine=engine), future)
    assert found == expected
    assert {count for count, _ in found.accepted} == {0, 1, 2, 3}
    assert acl.violations == []
    assert acl.live.left() == {}


@pytest.mark.parametrize("kinds", IN_PLACE, ids=lambda kinds: "-".join(kinds) or "nothing")
def test_offline_models_say_what_onnx_runtime_says_whatever_changes_in_place(
    kinds: tuple[str, ...], truth: tuple[list[int], Story], tmp_path: Path
) -> None:
    check(in_place(exported(), kinds), truth, tmp_path)


@pytest.mark.parametrize("layout", ["paged", "slots"])
def test_offline_models_say_what_onnx_runtime_says_in_the_layouts_of_ascend(
    layout: Layout, truth: tuple[list[int], Story], tmp_path: Path
) -> None:
    check(in_layout(exported(), layout), truth, tmp_path)


def test_the_checklist_for_a_device_runs_on_the_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = exported()
    acl = module_acl(made, random_checkpoint(), made.directory / OM_DIRECTORY)
    monkeypatch.setitem(sys.modules, "acl", acl)
    text = (Path(__file__).parents[1] / "docs" / "om-checklist.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for name in ("ONNX_PACKAGE", "PACKAGE"):
        code = code.replace(f'"{name}"', repr(str(made.directory)))
    exec(compile(code, "om-checklist.md", "exec"), {"__name__": "checklist"})
    assert acl.names().count("acl.mdl.execute") > 100
    assert acl.violations == []
    assert acl.live.left() == {}
