"""An installed torch_npu on a machine without CANN: torch and transformers must still come up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qwen_mtp.export.torchair import bring_up
from qwen_mtp.ge.wheel import has_cann, hidden_torch_npu
from tests.commands import checkpoint, exported

METADATA = "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n"
VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages, with a torch_npu that cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so: no')\n")
    info = folder / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return folder


def python(
    site: Path, code: str, *arguments: object, **environment: str
) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=inherited | {"PYTHONPATH": str(site)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


pytestmark = pytest.mark.skipif(has_cann(), reason="torch_npu may load where CANN is installed")


def test_torch_comes_up_after_this_package_and_only_after_it(site: Path) -> None:
    alone = python(site, "import torch")
    assert alone.returncode == 1
    assert "Failed to load the backend extension: torch_npu" in alone.stderr
    code = (
        f"import os, qwen_mtp, torch; print(torch.ones(2).sum().item(), os.environ['{VARIABLE}'])"
    )
    after = python(site, code)
    assert (after.returncode, after.stdout, after.stderr) == (0, "2.0 0\n", "")


def test_only_a_machine_with_the_wheel_and_without_cann_is_told(
    site: Path, tmp_path: Path
) -> None:
    code = f"import os, sys, qwen_mtp; print(os.environ.get('{VARIABLE}'), 'torch' in sys.modules)"
    assert python(tmp_path, code).stdout == "None False\n"
    assert python(site, code).stdout == "0 False\n"
    assert python(site, code, **{VARIABLE: "1"}).stdout == "1 False\n"
    (tmp_path / "libascendcl.so").touch()
    assert python(site, code, LD_LIBRARY_PATH=f"/nowhere:{tmp_path}").stdout == "None False\n"


def test_the_commands_work_beside_it(site: Path) -> None:
    code = "from qwen_mtp.cli import main; main()"
    done = python(site, code, "inspect", checkpoint())
    assert (done.returncode, done.stderr) == (0, "")
    assert "15 MTP tensors" in done.stdout


@pytest.mark.slow
def test_a_package_is_compared_with_transformers_beside_it(site: Path) -> None:
    package = exported("-k", "1", "--format", "fp32", "--no-verify", "-q")[0]
    code = "from qwen_mtp.cli import main; main()"
    done = python(site, code, "verify", package, "--checkpoint", checkpoint(), "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok   transformers" in done.stdout


def test_transformers_does_not_see_it_while_it_is_hidden(site: Path) -> None:
    code = """
from qwen_mtp.ge.wheel import hidden_torch_npu
import importlib.util, sys
with hidden_torch_npu():
    assert importlib.util.find_spec("torch_npu") is None
    from transformers.utils import import_utils
    assert import_utils.is_torch_npu_available() is False
assert "torch_npu" not in sys.modules
assert importlib.util.find_spec("torch_npu") is not None
assert import_utils.is_torch_npu_available() is False
"""
    done = python(site, code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_recurrent_kernel_answers_in_the_type_of_its_values(dtype: torch.dtype) -> None:
    bring_up()
    rows, states = torch.empty(4, 2, 16, dtype=dtype), torch.empty(4, 2, 16, 16, dtype=dtype)
    given = [tensor.to("meta") for tensor in (rows, rows, rows, states)]
    out, new = torch.ops.npu.npu_recurrent_gated_delta_rule_functional(*given)
    assert (out.dtype, new.dtype, out.shape, new.shape) == (dtype, dtype, rows.shape, states.shape)


def test_what_was_loaded_before_it_was_hidden_is_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = type(sys)("torch_npu")
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
    with hidden_torch_npu():
        assert sys.modules["torch_npu"] is None
    assert sys.modules["torch_npu"] is stand_in
