"""What a back end tells of the models it has written."""

from dataclasses import dataclass

from qwen_mtp.graphs.manifest import AscendTarget


@dataclass(frozen=True, slots=True)
class Form:
    """The part of a manifest that depends on the back end; fields are those of the manifest."""

    backend: str
    model_file: str
    weights_file: str
    tools: dict[str, str]
    ascend: AscendTarget | None = None
    native_file: str | None = None
