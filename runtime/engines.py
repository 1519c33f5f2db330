"""Chooses what runs the graphs of a package: ONNX Runtime, or AscendCL on an NPU.

Each is imported only where it is needed, so that neither must be installed for the other.
"""

from qwen_mtp.errors import MissingExtraError, PackageError, RequestError
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.runner import GraphRunner

ELSEWHERE = "without an NPU, use qwen-mtp verify, or qwen-mtp run --interpret, which is slow"


def open_engine(
    package: Package,
    *,
    threads: int | None = None,
    device: int | None = None,
    keep_logits: bool = False,
    native: bool | None = None,
) -> GraphRunner:
    """Load the graphs of a package for the back end that it was exported for.

    Args:
        package: The package.
        threads: ONNX Runtime: threads inside an operator; None takes the number of usable cores.
        device: Ascend: which NPU, as ``npu-smi info`` counts; None takes the first.
        keep_logits: Keep the logits of each pass readable.
        native: ONNX Runtime: run on the native kernels, or not; None where there are some.

    Returns:
        An engine; :func:`close_engine` gives back what it holds.

    Raises:
        MissingExtraError: Ascend: CANN's module ``acl`` cannot be imported.
        PackageError: The graphs are not compiled yet, or cannot be loaded.
        RequestError: An argument is not for this back end, or out of range.
    """
    if package.manifest.backend == "ascend":
        if native is not None:
            raise RequestError("native kernels are for packages that run on the CPU; leave it out")
        return _open_om(package, threads, device or 0, keep_logits)
    if device is not None:
        raise RequestError(
            f"device is {device}: this package runs on the CPU; leave it out, or export with "
            "--target air"
        )
    from qwen_mtp.runtime.engine import Engine

    return Engine(package, threads=threads, keep_logits=keep_logits, native=native)


def kernels_of(engine: GraphRunner) -> str:
    """What an engine computes with: ``native``, ``onnxruntime``, or ``ascend``."""
    found = getattr(engine, "kernels", None)
    if found is None:
        return "ascend"
    return "onnxruntime" if found.library is None else "native"


def prepare_kernels(package: Package, native: bool | None, progress: Progress) -> None:
    """Compile the native kernels in a phase of its own, where loading the package would do it."""
    if native is False or package.manifest.native_file is None:
        return
    from qwen_mtp.runtime.native import find_kernels, slow_products

    if native is None and slow_products(package.manifest.geometry.format):
        return
    if find_kernels(build=False).pending:
        progress.phase("compiling the native kernels for this CPU, once")
        find_kernels()
        progress.done()


def close_engine(engine: GraphRunner) -> None:
    """Give back what an engine of :func:`open_engine` holds on a device; twice is harmless.

    Raises:
        PackageError: AscendCL refused to release something; the rest was released.
    """
    close = getattr(engine, "close", None)  # memory of this process goes with the engine
    if close is not None:
        close()


def _open_om(package: Package, threads: int | None, device: int, keep_logits: bool) -> GraphRunner:
    from qwen_mtp.runtime.om import OM_DIRECTORY, OmEngine

    if threads is not None:
        raise RequestError(f"threads is {threads}: an NPU has none to choose; leave it out")
    if device < 0:
        raise RequestError(f"device is {device}: give a number >= 0, npu-smi info lists them")
    folder = package.directory / OM_DIRECTORY
    missing = [g.name for g in package.manifest.graphs if not (folder / f"{g.name}.om").is_file()]
    if missing:
        raise PackageError(
            f"{folder}: no {missing[0]}.om; where CANN is installed, compile the graphs with "
            f"sh {package.directory}/ascend/atc.sh; {ELSEWHERE}"
        )
    try:
        return OmEngine(package, device=device, keep_logits=keep_logits)
    except MissingExtraError as error:
        raise MissingExtraError(f"{package.directory}: {error}; {ELSEWHERE}") from error
