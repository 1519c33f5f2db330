"""What an export will read, build and write, worked out from the headers of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen_mtp.config import ModelConfig
from qwen_mtp.errors import CheckpointError, ExportError
from qwen_mtp.export.blueprint import Blueprint
from qwen_mtp.export.checkpoint import Checkpoint
from qwen_mtp.export.weights import check_sources
from qwen_mtp.graphs.spec import AscendChoice, Geometry, OpsetDomain
from qwen_mtp.graphs.weights import file_bytes

INTERPRETER = 500 << 20  # what torch and a traced model take, measured
LOADING = 2.3  # peak of a loading session over the bytes of its weights, measured
LAYER = 16 << 20  # a layer of GE models while they are converted, measured with 8 and 24
COPIES = 3  # float32 copies of the largest matrix while graphs are evaluated, measured


@dataclass(frozen=True, slots=True)
class Plan:
    """What an export will read, build and write.

    Attributes:
        checkpoint: The source.
        geometry: The static choices.
        blueprint: The fake modules, the layout of the weight file and the signatures.
        used: Canonical names of the tensors that are read.
        unused: Tensors that stay behind, by canonical name.
        ascend: What GE models are made for; None for ONNX.
        opset_domain: Whose operators ONNX models use.
    """

    checkpoint: Checkpoint
    geometry: Geometry
    blueprint: Blueprint
    used: tuple[str, ...]
    unused: tuple[str, ...]
    ascend: AscendChoice | None = None
    opset_domain: OpsetDomain = "microsoft"

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model."""
        return self.checkpoint.config

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight file without padding."""
        return file_bytes(self.blueprint.stored)

    @property
    def peak_bytes(self) -> int:
        """Estimated peak memory of an export that ends with its check.

        Writing takes about one tensor; the peak is the check, when a session is loading and the
        pages of the file are in memory beside the packed copies. For Ascend no session is loaded
        and weights are mapped: it is the conversion, or one product.
        """
        if self.ascend is not None:
            table = 4 * self.config.vocab_size * self.config.hidden_size
            return INTERPRETER + LAYER * len(self.config.layer_kinds) + COPIES * table
        return INTERPRETER + int(LOADING * self.weight_bytes)


def plan_export(
    directory: Path,
    geometry: Geometry,
    ascend: AscendChoice | None = None,
    opset_domain: OpsetDomain = "microsoft",
    draft_ids: Sequence[int] = (),
) -> Plan:
    """Read the checkpoint's headers and work everything out without touching a weight.

    Args:
        directory: The checkpoint.
        geometry: The static choices.
        ascend: What GE models are made for; None for ONNX.
        opset_domain: Whose operators ONNX models use.
        draft_ids: ``geometry.draft_vocab`` token ids, ascending.

    Raises:
        CheckpointError: The checkpoint cannot be exported.
        ExportError: The choices do not fit the model.
    """
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    if geometry.max_model_len > config.max_position_embeddings:
        raise ExportError(
            f"max_model_len is {geometry.max_model_len}, the model was made for "
            f"{config.max_position_embeddings} positions; lower it"
        )
    if geometry.lookaheads and not config.num_mtp_layers:
        raise CheckpointError(
            f"{directory}/config.json: mtp_num_hidden_layers is 0, there is no MTP head; "
            "export the target alone with --no-mtp"
        )
    own_files = ascend is not None
    blueprint = Blueprint(config, geometry, own_files=own_files, draft_ids=draft_ids)
    sources = (source.key for group in blueprint.groups for source in group.sources)
    used = tuple(dict.fromkeys(sources))
    spare = () if geometry.lookaheads else ("mtp.",)
    unused = checkpoint.check_coverage(used, allow_unused=spare)
    check_sources(checkpoint, blueprint.groups)
    return Plan(checkpoint, geometry, blueprint, used, unused, ascend, opset_domain)
