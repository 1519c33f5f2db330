"""Writes the folder ``ascend`` of a package: models, ATC commands, a note for the device."""

from pathlib import Path
from typing import Any

from google.protobuf import text_format

from qwen_mtp.errors import ExportError
from qwen_mtp.export.air import compose_air
from qwen_mtp.export.form import Form
from qwen_mtp.export.plan import Plan
from qwen_mtp.export.torchair import Writer
from qwen_mtp.ge.wheel import find_wheel
from qwen_mtp.graphs.manifest import AscendTarget
from qwen_mtp.graphs.spec import AscendChoice
from qwen_mtp.progress import Progress

FOLDER = "ascend"
WEIGHTS = "weights"
LARGEST = 1 << 31  # bytes that a protobuf message must stay below

_ATC = """\
#!/bin/sh
# Compiles the models of this folder with ATC. Needs CANN: source its set_env.sh first.
#
#   sh ascend/atc.sh                     all graphs, for the chip of the export
#   SOC_VERSION=NAME sh ascend/atc.sh    for another chip of the same family
#
# The weight files are named relative to this folder, so ATC runs in it. With external weights the
# compiled models stay small, and equal weights of all of them become one file in om/weight. Types
# are kept as they are in the models: the parity check is about these.
set -eu
cd "$(dirname "$0")"
SOC_VERSION="${{SOC_VERSION:-{soc}}}"
{opp}command -v atc >/dev/null || {{
  echo "error: atc not found; source CANN's set_env.sh" >&2
  exit 1
}}
mkdir -p om
for graph in {graphs}; do
  echo "atc: $graph for $SOC_VERSION" >&2
  atc --framework=1 --model="$graph.air" --output="om/$graph" --soc_version="$SOC_VERSION" \\
    --external_weight=1 --precision_mode_v2=origin --deterministic=1 --log=error "$@"
done
"""
_OPP = """\
# These graphs use {ops}: an operator package beside CANN.
: "${{ASCEND_CUSTOM_OPP_PATH:?set it to the vendors folder of the operator package}}"
"""
_README = """\
# Graphs for Ascend

GE models of one Qwen checkpoint{head}, lowering `{lowering}`, for {soc}. When they were written,
none had been compiled or run on an NPU. `qwen-mtp verify` checks them without one; `verification`
in `../manifest.json` has what it found, or `null` where it did not run.

| file | what |
|---|---|
| `*.air`, `*.pbtxt` | one model for each graph of `../manifest.json`, and the same as text |
| `weights/` | raw little-endian tensors, shared by all models |
| `golden.npz` | where there is one: inputs and outputs of a short script as the torch definition \
computes them, to compare with on the device |
| `atc.sh` | the ATC commands |

On the machine with the device:

1. Install CANN, with its Python module `acl`, and qwen-mtp: the base install, without torch; with
   the extra `text` to give and get text.
2. `source` CANN's `set_env.sh`, then `sh atc.sh` in this folder: writes `om/<graph>.om`. For
   another chip of the same family, `SOC_VERSION=NAME sh atc.sh`.
3. `qwen-mtp run PACKAGE --prompt "..." --device 0`, where PACKAGE is the folder above this one; or
   `--prompt-ids 1,2,3` without the extra.

Inputs and outputs, types and shapes: `qwen-mtp inspect --graphs` on the package. In the project
qwen-mtp, docs/ascend.md has limits, messages and how to compare with `golden.npz`, and
docs/om-checklist.md is for the first run on a device.
"""
_HEAD = " with its MTP head"


def write_air(plan: Plan, directory: Path, progress: Progress) -> Form:
    """Write the models; the weights are the caller's, their folder is made.

    Raises:
        ExportError: A graph cannot be converted.
        MissingExtraError: torch_npu is missing or of another release.
        OSError: A file cannot be written.
    """
    assert plan.ascend is not None
    folder = directory / FOLDER
    (folder / WEIGHTS).mkdir(parents=True)
    names: list[str] = []
    writers: set[Writer] = set()
    for spec, model, writer in compose_air(
        plan.blueprint, plan.ascend, WEIGHTS, lambda name: progress.phase(f"graph {name}")
    ):
        _write_model(folder / spec.name, model)
        names.append(spec.name)
        writers.add(writer)
    (folder / "atc.sh").write_text(_script(plan.ascend, names), encoding="utf-8")
    (folder / "README.md").write_text(_note(plan, plan.ascend), encoding="utf-8")
    (writer,) = writers
    return Form(
        "ascend",
        f"{FOLDER}/{{graph}}.air",
        f"{FOLDER}/{WEIGHTS}/{{tensor}}",
        {"torch_npu": find_wheel().version},
        AscendTarget(choice=plan.ascend, writer=writer),
    )


def _write_model(stem: Path, model: Any) -> None:
    data = model.SerializeToString(deterministic=True)
    if len(data) >= LARGEST:
        raise ExportError(
            f"{stem.name}: the model has {len(data)} bytes, GE reads less than {LARGEST}; "
            "export with a smaller --prefill-chunk"
        )
    stem.with_name(f"{stem.name}.air").write_bytes(data)
    stem.with_name(f"{stem.name}.pbtxt").write_text(
        text_format.MessageToString(model), encoding="utf-8"
    )


def _script(choice: AscendChoice, graphs: list[str]) -> str:
    opp = _OPP.format(ops=", ".join(choice.custom_ops)) if choice.custom_ops else ""
    return _ATC.format(soc=choice.soc_version, graphs=" ".join(graphs), opp=opp)


def _note(plan: Plan, choice: AscendChoice) -> str:
    head = _HEAD if plan.geometry.lookaheads else ""
    return _README.format(head=head, lowering=choice.lowering, soc=choice.soc_version)
