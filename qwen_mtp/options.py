"""What the commands take: types of values, and the options of an export and of a request."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DEFAULT_LOOKAHEADS = (1, 3)
DEFAULT_SOC = "Ascend910B4"
DIRECTORY = click.Path(path_type=Path, readable=False)  # what cannot be read exits with 1
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="Threads in an operator  [default: usable cores]",
)
native_option = click.option(
    "--native/--no-native",
    default=None,
    help="Kernels compiled for this CPU, or ONNX Runtime's  [default: native where they can be]",
)
device_option = click.option(
    "--device",
    type=click.IntRange(0),
    help="Ascend: which NPU, as npu-smi info counts  [default: 0]",
)
interpret_option = click.option(
    "--interpret",
    is_flag=True,
    help="Ascend: run the graphs without an NPU, operator by operator. Slow: for checks.",
)


class LookaheadList(click.ParamType[tuple[int, ...]]):
    """``3`` or ``3,1``: numbers of drafts, each 1..15."""

    name = "K[,K...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse the list."""
        if isinstance(value, tuple):
            return value
        parse: Any = click.IntRange(1, 15)
        return tuple(parse.convert(part.strip(), param, ctx) for part in str(value).split(","))


class Number(click.FloatRange):
    """A number within limits; ``nan``, which no limit refuses, is none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse and compare."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class IdList(click.ParamType[list[int]]):
    """``1,2,3``: token ids."""

    name = "ID[,ID...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """Parse the list; an empty one is left to the package to refuse."""
        if isinstance(value, list):
            return value
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        parse: Any = click.INT
        return [parse.convert(part, param, ctx) for part in parts]


class CountOrFile(click.ParamType[int | Path]):
    """``32768`` or the path of a file."""

    name = "N|FILE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Path:
        """A number where it is one."""
        try:
            return int(value)
        except (TypeError, ValueError):
            return Path(value)


def export_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The choices of an export as options."""
    return _with_options(
        command,
        click.option(
            "--target", type=click.Choice(["onnx", "air"]), default="onnx", show_default=True,
            help="What the package is made for: onnx is ONNX Runtime on the CPU, air are GE models"
            " for an Ascend NPU, which ATC compiles.",
        ),
        click.option(
            "--opset-domain", type=click.Choice(["microsoft", "standard"]),
            help="onnx: whose operators; standard is ai.onnx alone, with static shapes, for ATC"
            " and other readers, and slower here  [default: microsoft]",
        ),
        click.option(
            "--format", "format_", type=click.Choice(["fp32", "fp16", "bf16", "int8", "int4"]),
            default="int8", show_default=True,
            help="Weight format; fp16 and bf16 are for air, fp16 for standard ONNX too.",
        ),
        click.option(
            "-k", "--num-speculative-tokens", "lookaheads", type=LookaheadList(), multiple=True,
            help="Drafts a round: K, or K,K for several"
            f"  [default: {','.join(map(str, DEFAULT_LOOKAHEADS))}]",
        ),
        click.option(
            "--max-model-len", type=click.IntRange(2),
            help="Positions of a sequence, prompt included  [default: 4096 or the model's limit]",
        ),
        click.option(
            "--max-num-seqs", type=click.IntRange(1, 256), default=1, show_default=True,
            help="Sequences that run together; each slot has its own state.",
        ),
        click.option(
            "--block-size", type=click.Choice(["8", "16", "32", "64", "128", "256"]),
            help="Positions in a block of the key/value pools, which sequences take as they grow"
            "  [default: 64, with fused attention 128]",
        ),
        click.option(
            "--prefill-chunk", type=click.IntRange(1, 4096), default=128, show_default=True,
            help="Rows of a prompt in one pass; more need more scratch memory.",
        ),
        click.option(
            "--kv-dtype", type=click.Choice(["float32", "float16"]),
            help="onnx: what keys and values are stored in; float16 is half the memory  [default:"
            " float32]",
        ),
        click.option(
            "--lowering", type=click.Choice(["portable", "fused"]),
            help="air: standard operators, or kernels of the chip  [default: portable]",
        ),
        click.option(
            "--soc-version", metavar="NAME",
            help=f"air: the chip, as ATC names it  [default: {DEFAULT_SOC}]",
        ),
        click.option(
            "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]),
            help="air: activations and state  [default: as the weights, or half precision]",
        ),
        click.option(
            "--custom-op", "custom_ops", multiple=True, metavar="TYPE",
            help="air: use this operator of an operator package; may be repeated.",
        ),
        click.option(
            "--draft-vocab", type=CountOrFile(), metavar="N|FILE",
            help="Take drafts from N tokens, or from the ids in FILE: same text, cheaper drafts;"
            " 0 is the whole vocabulary  [default: 32768 where it has more than 65536]",
        ),
        click.option(
            "--draft-vocab-text", type=DIRECTORY, metavar="FILE",
            help="The N most frequent tokens of this text  [default: the lowest ids]",
        ),
        click.option("--no-mtp", is_flag=True, help="The target alone, for plain decoding."),
        click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
        click.option("--overwrite", is_flag=True, help="Replace an existing package."),
        click.option("--no-verify", is_flag=True, help="Skip the parity check at the end."),
    )  # fmt: skip


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a request; what is not given is the package's default."""
    theirs = "[default: the checkpoint's generation_config]"
    return _with_options(
        command,
        click.option(
            "--max-tokens", type=int, default=128, show_default=True, help="Most tokens to emit."
        ),
        click.option("--temperature", type=float, help=f"0 is greedy  {theirs}"),
        click.option(
            "--top-k", type=int, help=f"Draw from the k likeliest tokens; 0 keeps all  {theirs}"
        ),
        click.option(
            "--top-p", type=float,
            help=f"Draw from the likeliest tokens up to this mass; 1 keeps all  {theirs}",
        ),
        click.option("--seed", type=int, help="Repeat a sampled text  [default: a fresh one]"),
        click.option("--stop", multiple=True, help="End before this text; may be repeated."),
        click.option("--ignore-eos", is_flag=True, help="Go on after the end of the text."),
        click.option(
            "-k", "--num-speculative-tokens", type=click.IntRange(0, 15),
            help="Drafts a round, 0 is plain decoding  [default: the most exported]",
        ),
        click.option(
            "--adaptive/--no-adaptive", default=True, show_default=True,
            help="Fewer drafts, or none, in rounds where they do not pay.",
        ),
    )  # fmt: skip


def _with_options(command: Callable[..., Any], *options: Callable[..., Any]) -> Callable[..., Any]:
    """Apply decorators so that help lists the options in this order."""
    for option in reversed(options):
        command = option(command)
    return command
