"""The guard must run before anything else imports torchvision, so every test starts a new interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GUARD = "from patchcure._torchvision import ensure_torchvision as ensure\n"
MISMATCH = "operator torchvision::nms does not exist"


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that looks for modules in `path` first."""
    search = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with a torchvision that fails at import with the message in the variable MESSAGE."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from torchvision import transforms, _meta_registrations\n")
    (package / "_meta_registrations.py").write_text("import os\nraise RuntimeError(os.environ['MESSAGE'])\n")
    (package / "transforms.py").write_text("")
    return tmp_path


def test_timm_and_transforms_import_after_the_guard() -> None:
    result = run(GUARD + "ensure(); ensure()\nimport timm; from torchvision import transforms; transforms.ToTensor()")
    assert result.returncode == 0, result.stderr


def test_importing_the_package_leaves_torchvision_alone() -> None:
    result = run("import sys, patchcure\nassert 'torchvision' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_mismatched_build_is_repaired(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESSAGE", MISMATCH)
    result = run(GUARD + "ensure(); ensure()\nfrom torchvision import transforms", broken)
    assert result.returncode == 0, result.stderr


def test_other_errors_are_not_hidden(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESSAGE", "out of memory")
    result = run(GUARD + "ensure()", broken)
    assert "RuntimeError: out of memory" in result.stderr
