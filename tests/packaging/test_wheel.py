"""What `python -m build` makes, installed into a clean environment, is the whole package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from support.repository import LINKED_FOLDERS, ROOT, repository_files, source_files

IMPORT_ALL = """
import importlib, importlib.util, json, pkgutil, sys
import k3jax
names = sorted(module.name for module in pkgutil.walk_packages(k3jax.__path__, "k3jax."))
names = [name for name in names if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
bare = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is not None]
json.dump({"file": k3jax.__file__, "modules": names, "bare": bare}, sys.stdout)
"""


def run(command: list[str], folder: Path) -> str:
    """Runs a command with no PYTHONPATH; its stdout, or a failed test that shows what it said."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it, built from a copy without network access."""
    tree = tmp_path_factory.mktemp("tree")
    for path in repository_files():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tree / path, follow_symlinks=False)
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)], out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment with the wheel; third-party packages come from the running one."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=os.name != "nt", with_pip=False)
    python = folder / "bin" / "python"
    site_packages = Path(
        run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    )
    # addsitedir also reads the .pth files there, which CUTLASS needs; it appends, so the wheel comes first.
    outer = sysconfig.get_path("purelib")
    (site_packages / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    run([sys.executable, "-P", "-m", "pip", "--python", str(python), *install], folder)
    return python


def test_the_wheel_holds_every_source_and_data_file_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {path.as_posix() for path in source_files()}


def test_the_sdist_holds_the_license_and_the_readme(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_every_module_imports_from_the_wheel_and_no_bare_name_leaks(
    clean_python: Path, tmp_path: Path
) -> None:
    answer = json.loads(run([str(clean_python), "-c", IMPORT_ALL, *LINKED_FOLDERS], tmp_path))
    assert Path(answer["file"]).is_relative_to(clean_python.parents[1])
    modules = {path.with_suffix("") for path in source_files() if path.suffix == ".py"}
    modules = {
        path.parent if path.name == "__init__" else path for path in modules if path.name != "__main__"
    }
    expected = {".".join(path.parts) for path in modules} - {"k3jax"}
    assert set(answer["modules"]) == expected
    assert answer["bare"] == []


def test_the_installed_command_describes_itself(clean_python: Path, tmp_path: Path) -> None:
    text = run([str(clean_python.with_name("k3jax")), "--help"], tmp_path)
    for command in ("generate", "inspect", "convert"):
        assert command in text
