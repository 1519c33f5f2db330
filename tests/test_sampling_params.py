"""What a request may ask for, and what it is told otherwise."""

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from qwen_mtp.errors import RequestError
from qwen_mtp.runtime.sampling import GenerationDefaults, ResolvedSampling, SamplingParams

PACKAGE = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95)

REFUSED = ["presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias"]
REFUSED += ["logprobs", "prompt_logprobs", "n", "best_of", "bad_words", "structured_outputs"]


def test_what_is_not_asked_comes_from_the_package() -> None:
    found = SamplingParams(seed=5).resolve(PACKAGE)
    assert found == ResolvedSampling(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        seed=5,
        max_tokens=16,
        stop=(),
        stop_token_ids=frozenset(),
        ignore_eos=False,
        min_tokens=0,
    )
    assert not found.greedy


def test_what_is_asked_beats_the_package() -> None:
    asked = SamplingParams(
        temperature=2,
        top_k=3,
        top_p=1,
        seed=2**64 - 1,
        max_tokens=None,
        stop=["a", "b"],
        stop_token_ids=[7, 7, 0],
        ignore_eos=True,
        min_tokens=4,
    )
    assert asked.resolve(PACKAGE) == ResolvedSampling(
        temperature=2.0,
        top_k=3,
        top_p=1.0,
        seed=2**64 - 1,
        max_tokens=None,
        stop=("a", "b"),
        stop_token_ids=frozenset({0, 7}),
        ignore_eos=True,
        min_tokens=4,
    )


@pytest.mark.parametrize("defaults", [None, GenerationDefaults()])
def test_without_package_defaults_the_law_is_the_models_own(
    defaults: GenerationDefaults | None,
) -> None:
    found = SamplingParams().resolve(defaults)
    assert (found.temperature, found.top_k, found.top_p) == (1.0, 0, 1.0)


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_0_and_minus_1_turn_the_packages_top_k_off(off: int) -> None:
    assert SamplingParams(top_k=off).resolve(PACKAGE).top_k == 0


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9.9e-6, True), (1e-5, False)])
def test_greedy_is_a_temperature_below_1e_minus_5_in_one_form(
    temperature: float, greedy: bool
) -> None:
    found = SamplingParams(temperature=temperature, seed=1).resolve(PACKAGE)
    assert found.greedy is greedy
    if greedy:
        assert found == SamplingParams(temperature=0, top_k=5, top_p=0.5, seed=1).resolve()


def test_package_defaults_can_be_greedy() -> None:
    assert SamplingParams().resolve(GenerationDefaults(temperature=0.0)).greedy


def test_a_request_without_a_seed_gets_a_new_one_each_time() -> None:
    params = SamplingParams()
    assert len({params.resolve().seed for _ in range(50)}) == 50


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", -1e-9),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", True),
        ("top_k", "5"),
        ("top_p", 0),
        ("top_p", -0.1),
        ("top_p", 1.0000001),
        ("top_p", math.nan),
        ("top_p", False),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", None),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop", b"a"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", False),
        ("ignore_eos", 1),
    ],
)
def test_a_value_out_of_range_is_one_line_that_names_it(name: str, value: object) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=rf"^{name} (is|holds) .*(give|lower)") as caught:
        SamplingParams(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("temperature", np.float32(0.5), 0.5),
        ("top_k", np.int64(3), 3),
        ("top_p", 5e-324, 5e-324),
        ("top_p", 1, 1.0),
        ("max_tokens", 1, 1),
        ("min_tokens", 16, 16),
        ("seed", 0, 0),
        ("stop", "ab", ("ab",)),
        ("stop", ("a", "b"), ("a", "b")),
        ("stop", [], ()),
        ("stop_token_ids", np.array([3, 4]), (3, 4)),
    ],
)
def test_values_at_the_edge_and_numpy_numbers_are_kept_in_plain_form(
    name: str, value: object, kept: object
) -> None:
    arguments: dict[str, Any] = {name: value}
    found = getattr(SamplingParams(**arguments), name)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("temprature", "temperature"),
        ("max_new_tokens", "max_tokens"),
        ("topk", "top_k"),
        ("stops", "stop"),
        ("presense_penalty", "presence_penalty"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(name: str, near: str) -> None:
    arguments: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=f"{name!r}; did you mean {near!r}"):
        SamplingParams(**arguments)


def test_a_keyword_like_no_other_gets_the_whole_list() -> None:
    arguments: dict[str, Any] = {"zzz": 1}
    with pytest.raises(TypeError, match="known: temperature, top_k, top_p, seed"):
        SamplingParams(**arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_what_other_engines_take_is_refused_as_not_supported_yet(name: str) -> None:
    arguments: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=f"{name!r} is not supported yet"):
        SamplingParams(**arguments)


def test_parameters_are_values_frozen_hashable_and_copied_whole() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop, top_k=3)
    stop.append("b")
    assert params.stop == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 4  # type: ignore[misc]
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(stop="a", top_k=3))
    assert dataclasses.replace(params, top_k=4) == SamplingParams(stop="a", top_k=4)
    with pytest.raises(RequestError, match="top_k"):
        dataclasses.replace(params, top_k=-5)
