from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest

from qwen_mtp.errors import MissingExtraError, PackageError, QwenMtpError, RequestError
from qwen_mtp.graphs.spec import TensorSpec
from qwen_mtp.runtime.om import OmEngine
from qwen_mtp.runtime.package import Package
from tests.acl_stand_in import BAD_FILE, STOPPED, OmFile, StandIn
from tests.om_packages import HIDDEN, SLOTS, WIDTH, toy_acl, toy_package

VERIFY, DRAFT = "target_verify_r2", "mtp_draft_k1"
TABLE = np.zeros((SLOTS, WIDTH), np.int32)


@pytest.fixture
def toy(tmp_path: Path) -> Package:
    return toy_package(tmp_path)


@pytest.fixture
def acl(toy: Package) -> StandIn:
    return toy_acl(toy)


@pytest.fixture
def engine(toy: Package, acl: StandIn) -> Iterator[OmEngine]:
    with OmEngine(toy, keep_logits=True, acl=acl) as engine:
        yield engine
    assert acl.violations == []
    assert acl.live.left() == {}


def values(engine: OmEngine, name: str) -> list[float]:
    """One number a row where all elements of the row are equal."""
    rows = engine.state(name).reshape(SLOTS, -1)
    assert (rows == rows[:, :1]).all(), rows
    return rows[:, 0].tolist()


def odd(acl: StandIn, graph: str) -> OmFile:
    """The compiled graph, to be changed."""
    (file,) = [file for path, file in acl.files.items() if path.endswith(f"/{graph}.om")]
    return file


def refusal(toy: Package, acl: StandIn, error: type[QwenMtpError] = PackageError) -> str:
    """The one line an engine refuses to load with; nothing may be left behind."""
    with pytest.raises(error) as caught:
        OmEngine(toy, acl=acl)
    assert acl.violations == []
    assert acl.live.left() == {}
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_all_state_begins_as_zeros(engine: OmEngine) -> None:
    for state in engine.package.manifest.states:
        assert not engine.state(state.name).any(), state.name


def test_states_take_turns_and_in_place_ones_stay(engine: OmEngine) -> None:
    for turn in range(1, 4):
        engine.run(VERIFY, TABLE)
        assert values(engine, "conv") == values(engine, "stash") == [turn, turn]
        assert values(engine, "ssm") == values(engine, "key") == [turn, turn]


def test_a_prefill_advances_its_slot_alone(engine: OmEngine) -> None:
    engine.run(VERIFY, TABLE)
    engine.run("prefill", TABLE[:1], 1)
    engine.run("prefill", TABLE[:1], 1)
    assert values(engine, "conv") == values(engine, "ssm") == [1, 21]
    engine.run("prefill", TABLE[:1], 0)
    engine.run(VERIFY, TABLE)
    assert values(engine, "conv") == values(engine, "ssm") == [12, 22]
    assert values(engine, "stash") == [2, 2]
    assert values(engine, "key") == [32, 32]


def test_clearing_a_slot_leaves_the_other_slot_and_the_pools(engine: OmEngine) -> None:
    engine.run(VERIFY, TABLE)
    engine.clear_slot(1)
    for name in ("conv", "ssm", "stash"):
        assert values(engine, name) == [1, 0]
    assert values(engine, "key") == [1, 1]
    engine.run(VERIFY, TABLE)
    assert values(engine, "conv") == [2, 1]


def test_a_narrow_table_is_filled_up_with_block_0(engine: OmEngine) -> None:
    ids = engine.buffer(VERIFY, "token_ids")
    ids[:] = 1
    engine.run(VERIFY, np.full((SLOTS, WIDTH), 5, np.int32))
    assert (engine.buffer(VERIFY, "tokens") == ids.sum() + 5 * SLOTS * WIDTH).all()
    engine.run(VERIFY, np.full((SLOTS, 1), 5, np.int32))
    assert (engine.buffer(VERIFY, "tokens") == ids.sum() + 5 * SLOTS).all()
    assert engine.table_width(1) == WIDTH


def test_a_draft_reads_what_a_verify_gave_and_what_the_host_wrote_since(engine: OmEngine) -> None:
    engine.buffer(VERIFY, "token_ids")[:] = 25
    engine.run(VERIFY, TABLE)
    assert engine.buffer(DRAFT, "hidden") is engine.buffer(VERIFY, "hidden")
    engine.buffer(DRAFT, "tokens")[1, 0] = 3
    engine.buffer(DRAFT, "hidden")[1, 0] = np.full(HIDDEN, 4, np.float32)
    engine.run(DRAFT, TABLE)
    assert engine.buffer(DRAFT, "draft_ids").tolist() == [[107], [7]]


def test_logits_come_only_where_they_are_wanted(toy: Package, acl: StandIn) -> None:
    for keep in (False, True):
        with OmEngine(toy, keep_logits=keep, acl=acl) as engine:
            acl.calls.clear()
            engine.run(VERIFY, TABLE)
            assert engine.buffer(VERIFY, "logits").any() == keep
            downloads = [
                args[1] for name, args in acl.calls if name == "acl.rt.memcpy" and args[4] == 2
            ]
            assert downloads == [
                SLOTS * 2 * 4,
                SLOTS * 2 * HIDDEN * 4,
                *[SLOTS * 2 * 5 * 4] * keep,
            ]


def test_half_precision_states_take_half_and_are_shown_as_numbers(tmp_path: Path) -> None:
    sizes = {}
    for dtype in ("float32", "float16", "bfloat16"):
        toy = toy_package(tmp_path / dtype, dtype)
        acl = toy_acl(toy)
        with OmEngine(toy, acl=acl) as engine:
            sizes[dtype] = acl.calls[acl.names().index("acl.rt.malloc")][1][0]
            pointer = engine._states["conv"].buffers[0]
            for slot, value in enumerate((1.5, -2.0)):
                bits = int(np.float32(value).view(np.uint32)) >> 16
                data = np.full(32, bits, np.uint16) if dtype == "bfloat16" else None
                data = np.full(32, value, dtype) if data is None else data
                engine._device.upload(pointer + slot * data.nbytes, data)
            assert values(engine, "conv") == [1.5, -2.0]
    assert sizes == {"float32": 4 * 32 * 4, "float16": 4 * 32 * 2, "bfloat16": 4 * 32 * 2}


def test_the_order_of_the_compiled_inputs_does_not_matter(toy: Package, acl: StandIn) -> None:
    file = odd(acl, VERIFY)
    order = [3, 1, 5, 0, 4, 2]
    compute = file.compute
    file.inputs[:] = [file.inputs[i] for i in order]
    file.compute = lambda ins, outs: compute([ins[order.index(i)] for i in range(6)], outs)
    with OmEngine(toy, acl=acl) as engine:
        engine.run(VERIFY, TABLE)
        engine.run(VERIFY, TABLE)
        assert values(engine, "conv") == values(engine, "ssm") == [2, 2]
    assert acl.violations == []


def test_a_device_is_opened_used_and_given_back_in_order(toy: Package, acl: StandIn) -> None:
    engine = OmEngine(toy, acl=acl)
    loading = acl.names()
    assert loading[:4] == [
        "acl.init",
        "acl.rt.set_device",
        "acl.rt.create_context",
        "acl.rt.get_run_mode",
    ]
    acl.calls.clear()
    engine.run(VERIFY, TABLE)
    engine.run(VERIFY, TABLE)
    uploads, downloads = ["acl.rt.memcpy"] * 2, ["acl.rt.memcpy"] * 2
    first = ["acl.rt.set_context", *uploads, "acl.mdl.execute", *downloads]
    second = [*first[:3], *["acl.update_data_buffer"] * 4, *first[3:]]
    assert acl.names() == first + second
    acl.calls.clear()
    engine.close()
    taken = {
        "acl.rt.malloc": "acl.rt.free",
        "acl.mdl.load_from_file": "acl.mdl.unload",
        "acl.mdl.create_desc": "acl.mdl.destroy_desc",
        "acl.mdl.create_dataset": "acl.mdl.destroy_dataset",
        "acl.create_data_buffer": "acl.destroy_data_buffer",
        "acl.rt.create_context": "acl.rt.destroy_context",
        "acl.rt.set_device": "acl.rt.reset_device",
        "acl.init": "acl.finalize",
    }
    given_back = [taken[name] for name in reversed(loading) if name in taken]
    assert acl.names() == ["acl.rt.set_context", *given_back]
    engine.close()
    assert acl.names()[1:] == given_back
    with pytest.raises(RequestError, match="closed"):
        engine.run(VERIFY, TABLE)
    assert acl.violations == []


def story(toy: Package, acl: StandIn) -> None:
    """A whole life of an engine."""
    with OmEngine(toy, keep_logits=True, acl=acl) as engine:
        engine.clear_slot(1)
        engine.run("prefill", TABLE[:1], 1)
        engine.run(VERIFY, TABLE)
        engine.run(DRAFT, TABLE)
        engine.state("conv")


def test_whichever_call_fails_the_error_names_it_and_nothing_is_left(toy: Package) -> None:
    whole = toy_acl(toy)
    story(toy, whole)
    harmless = 0
    for n, name in enumerate(whole.names()):
        acl = toy_acl(toy)
        acl.fail_at = n
        try:
            story(toy, acl)
        except PackageError as error:
            line = str(error)
            assert "\n" not in line
            if "_by_index" not in name and "get_num" not in name:
                assert name in line, (n, name)
        else:  # entering the thread of the device in order to release
            assert name in ("acl.rt.set_context", "acl.mdl.get_output_name_by_index"), (n, name)
            harmless += 1
        assert acl.violations == [], (n, name)
        assert acl.live.left() == {}, (n, name)
    assert harmless == 1 + whole.names().count("acl.mdl.get_output_name_by_index")


def test_an_interruption_while_loading_leaves_nothing(
    toy: Package, acl: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(acl.mdl, "get_desc", interrupt)
    with pytest.raises(KeyboardInterrupt):
        OmEngine(toy, acl=acl)
    assert acl.violations == []
    assert acl.live.left() == {}


def test_an_engine_that_nobody_closed_is_given_back(toy: Package, acl: StandIn) -> None:
    OmEngine(toy, acl=acl)
    assert acl.violations == []
    assert acl.live.left() == {}


def test_engines_share_the_process_and_the_last_one_ends_it(toy: Package, acl: StandIn) -> None:
    first, second = OmEngine(toy, acl=acl), OmEngine(toy, acl=acl)
    first.close()
    second.run(VERIFY, TABLE)
    assert values(second, "conv") == [1, 1]
    assert "acl.finalize" not in acl.names()
    second.close()
    assert acl.names().count("acl.init") == acl.names().count("acl.finalize") == 1
    assert acl.violations == []
    assert acl.live.left() == {}


def test_what_somebody_else_initialised_is_left_to_them(toy: Package, acl: StandIn) -> None:
    assert acl.init() == 0
    OmEngine(toy, acl=acl).close()
    assert acl.violations == []
    assert acl.live.left() == {"process": 1}


def test_another_thread_may_run_and_close(toy: Package, acl: StandIn) -> None:
    engine = OmEngine(toy, acl=acl)

    def work() -> None:
        engine.run(VERIFY, TABLE)
        engine.clear_slot(0)
        engine.close()

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert acl.live.left() == {}
    assert acl.violations == []


def test_on_the_board_of_the_device_copies_stay_on_it(toy: Package, acl: StandIn) -> None:
    acl.on_board = True
    story(toy, acl)
    assert {args[-1] for name, args in acl.calls if name == "acl.rt.memcpy"} == {3}
    assert acl.violations == []


def test_without_cann_one_line_says_what_to_install(toy: Package) -> None:
    with pytest.raises(MissingExtraError) as caught:
        OmEngine(toy)
    assert "install CANN" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_model_is_named_with_what_compiles_it(toy: Package, acl: StandIn) -> None:
    path = toy.directory / "ascend" / "om" / f"{DRAFT}.om"
    path.unlink()
    line = refusal(toy, acl)
    assert line.startswith(f"{path}: ")
    assert "atc.sh" in line


def test_models_may_lie_elsewhere(toy: Package, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (toy.directory / "ascend" / "om").rename(elsewhere)
    acl = toy_acl(toy, elsewhere)
    with OmEngine(toy, elsewhere, acl=acl) as engine:
        engine.run(VERIFY, TABLE)


def test_odd_inputs_and_outputs_are_refused_by_name(toy: Package) -> None:
    def remove(ports: list[tuple[str, int]]) -> None:
        del ports[0]

    def rename(ports: list[tuple[str, int]]) -> None:
        ports.append(("alien", 4))

    def double(ports: list[tuple[str, int]]) -> None:
        ports.append(ports[0])

    def resize(ports: list[tuple[str, int]]) -> None:
        ports[0] = (ports[0][0], 48)

    cases = [
        ("inputs", remove, "has no input token_ids"),
        ("inputs", rename, "has an input 'alien'"),
        ("inputs", double, "several inputs of one name"),
        ("inputs", resize, "has 48 bytes for input token_ids, the manifest says 16"),
        ("outputs", remove, "has 4 outputs, the manifest lists 5"),
        ("outputs", resize, "has 48 bytes for output tokens, the manifest says 16"),
    ]
    for side, change, words in cases:
        acl = toy_acl(toy)
        change(getattr(odd(acl, VERIFY), side))
        line = refusal(toy, acl)
        assert f"{VERIFY}.om: {VERIFY} " in line
        assert words in line
        assert line.endswith("atc.sh")


def test_a_slot_that_the_device_cannot_address_is_refused(toy: Package) -> None:
    def thinner(tensor: TensorSpec) -> TensorSpec:
        if tensor.state != "conv":
            return tensor
        return replace(tensor, shape=(tensor.shape[0], 15))

    manifest = toy.manifest
    graphs = tuple(
        replace(g, inputs=tuple(map(thinner, g.inputs)), outputs=tuple(map(thinner, g.outputs)))
        for g in manifest.graphs
    )
    states = tuple(
        replace(s, shape=(SLOTS, 15)) if s.name == "conv" else s for s in manifest.states
    )
    thin = Package(toy.directory, msgspec.structs.replace(manifest, graphs=graphs, states=states))
    line = refusal(thin, toy_acl(thin))
    assert "a slot of conv takes 60 bytes" in line
    assert "--max-num-seqs 1" in line


def test_codes_of_ascendcl_come_with_their_meaning(toy: Package, acl: StandIn) -> None:
    acl.devices = 0
    line = refusal(toy, acl, RequestError)
    assert "acl.rt.set_device failed with 107001 in device 0" in line
    assert "npu-smi info" in line

    acl = toy_acl(toy)
    acl.memory_limit = 1000
    assert "(no memory is left; EE9999" in refusal(toy, acl)

    acl = toy_acl(toy)
    del acl.files[next(iter(acl.files))]
    assert f"acl.mdl.load_from_file failed with {BAD_FILE} in prefill" in refusal(toy, acl)

    acl = toy_acl(toy)
    with OmEngine(toy, acl=acl) as engine:
        acl.fail_at = len(acl.calls) + 3  # after the thread and two uploads
        acl.fail_code = STOPPED
        with pytest.raises(PackageError) as caught:
            engine.run(VERIFY, TABLE)
        assert f"acl.mdl.execute failed with {STOPPED} in {VERIFY} (the model stopped; " in str(
            caught.value
        )
        assert values(engine, "conv") == [0, 0]
    assert acl.live.left() == {}
