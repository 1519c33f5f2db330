"""What a processor can take: formats, rows, operators and dtypes."""

import pytest

from qwen_mtp.errors import ExportError
from qwen_mtp.ge.overlay import OVERLAY
from qwen_mtp.ge.soc import SOCS, check_format, check_rows, find_soc
from tests.ge_findings import B4, findings
from tests.ge_graphs import GraphBuilder, needs_wheel
from tests.ge_kernels import user_of

pytestmark = needs_wheel


def test_processors_are_found_whatever_the_case() -> None:
    assert find_soc("ascend310p3").family == "310P"
    assert len({soc.name for soc in SOCS}) == len(SOCS)


def test_an_unknown_processor_is_refused_with_those_known() -> None:
    with pytest.raises(ExportError, match=r"Ascend999: unknown processor; known are .*310P3"):
        find_soc("Ascend999")


def test_fused_passes_are_limited_in_rows() -> None:
    check_rows(find_soc(B4), "fused", 16)
    check_rows(find_soc(B4), "portable", 40)
    with pytest.raises(ExportError, match="16 drafts make passes of 17 rows"):
        check_rows(find_soc(B4), "fused", 17)
    with pytest.raises(ExportError, match="can take 8"):
        check_rows(find_soc("Ascend310P3"), "fused", 9)


def test_310p_has_neither_int4_nor_bfloat16_nor_float32() -> None:
    soc = find_soc("Ascend310P3")
    check_format(soc, "int8", "float16")
    with pytest.raises(ExportError, match="int4 weights; use fp16, int8"):
        check_format(soc, "int4", "float16")
    with pytest.raises(ExportError, match="bfloat16; use float16"):
        check_format(soc, "int8", "bfloat16")
    with pytest.raises(ExportError, match="fp32 weights; use fp16"):
        check_format(soc, "fp32", "float32")
    with pytest.raises(ExportError, match="computed in float16; use that"):
        check_format(soc, "int8", "float32")


def test_operators_and_dtypes_are_those_of_the_processor() -> None:
    b = GraphBuilder()
    ports = {
        "key": (4, 2, 16),
        "key_cache": (8, 16, 2, 16),
        "value": (4, 2, 16),
        "value_cache": (8, 16, 2, 16),
    }
    edges = {name: b.data(name, "bfloat16", shape) for name, shape in ports.items()}
    edges["slot_mapping"] = b.data("slots", "int32", (4,))
    order = ("key", "key_cache", "slot_mapping", "value", "value_cache")
    outputs = ("key_cache", "value_cache")
    edge = b.op("ScatterPaKvCache", {n: edges[n] for n in order}, outputs)
    model = b.end([(edge, "bfloat16", (8, 16, 2, 16))])
    assert findings(model) == []
    found = findings(model, "Ascend310P3")
    assert any("has no such operator" in f for f in found)
    assert any("does not have DT_BF16" in f for f in found)


def test_an_operator_of_a_package_is_taken_where_the_package_is() -> None:
    entry = next(entry for entry in OVERLAY if entry.op == "RecurrentGatedDeltaRule")
    model = user_of(entry)
    assert any("has no such operator" in f for f in findings(model, "Ascend310P3"))
    assert findings(model, "Ascend310P3", custom_ops=[entry.op]) == []
    assert any("takes DT_BF16, not DT_FLOAT16" in f for f in findings(model, B4))
