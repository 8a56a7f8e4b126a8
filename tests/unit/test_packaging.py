"""The wheel: sources of the kernel programs inside, working from site-packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import tailbound

LABORATORY = Path("host_lib", "tailbound_lab")
SOURCES = {"ebpf": "*.h", "xdp_programs": "*.[ch]", "p4": "*.p4", "host_lib/core": "*.[ch]"}


def pip(*arguments: str | Path, python: str | Path = sys.executable) -> None:
    """pip without a network, from the packages that are here."""
    command = [python, "-m", "pip", "--isolated", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def sources(root: Path) -> dict[str, Path]:
    """Files of the checkout by their names among the package's assets."""
    folders = [(root / folder, pattern) for folder, pattern in SOURCES.items()]
    return {path.relative_to(folder.parent).as_posix(): path for folder, kind in folders for path in folder.rglob(kind)}


@pytest.fixture(scope="session")
def checkout(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs, so that building leaves nothing in the repository."""
    target = tmp_path_factory.mktemp("checkout")
    listed = ("pyproject.toml", "README.md", "LICENSE", "LICENSES", "host_lib", "ebpf", "xdp_programs", "p4")
    skip = ["--exclude=__pycache__", "--exclude=*.egg-info"]
    tar = subprocess.run(["tar", "-C", repository, *skip, "-c", *listed], capture_output=True, check=True)
    subprocess.run(["tar", "-C", target, "-x"], input=tar.stdout, check=True)
    return target


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", out, checkout)
    (found,) = out.glob("tailbound-*.whl")
    return found


def test_version_is_the_same_everywhere(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["version"] == tailbound.__version__
    assert f"## {tailbound.__version__}" in (repository / "CHANGELOG.md").read_text()
    laboratory = tomllib.loads((repository / LABORATORY / "pyproject.toml").read_text())["project"]
    assert laboratory["version"] == tailbound.__version__
    assert laboratory["dependencies"] == [f"tailbound=={tailbound.__version__}"]


def test_every_source_names_its_licence(repository: Path) -> None:
    files = list(sources(repository).values())
    assert {p.suffix for p in files} == {".c", ".h", ".p4"}
    for path in files:
        licence = "Apache-2.0" if path.suffix == ".p4" else "GPL-2.0-only OR BSD-2-Clause"
        assert f"SPDX-License-Identifier: {licence}" in path.read_text().splitlines()[0], path


def test_wheel_holds_sources_types_and_licences(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [n for n in names if n.endswith(".dist-info/METADATA")]
        (entries,) = [n for n in names if n.endswith(".dist-info/entry_points.txt")]
        headers = Parser().parsestr(archive.read(metadata).decode())
        points = archive.read(entries).decode()
    assert {f"tailbound/_assets/{name}" for name in sources(repository)} <= names
    assert "tailbound/py.typed" in names
    assert headers["License-Expression"] == "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)"
    licences = {n.rpartition("/")[2] for n in names if "/licenses/" in n}
    assert licences == {"LICENSE", "Apache-2.0.txt", "BSD-2-Clause.txt", "GPL-2.0-only.txt"}
    assert "tailbound = tailbound.cli:main" in points
    assert "pytest11" not in points
    assert not [n for n in names if n.startswith("tailbound_lab")]
    assert not [n for n in names if "__pycache__" in n or n.endswith((".nbi", ".nbc", ".o"))]


def test_wheel_works_from_site_packages(wheel: Path, repository: Path, tmp_path: Path) -> None:
    """A new environment with the wheel alone; its dependencies are those of the environment that runs the tests."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = home / "lib" / version / "site-packages"
    pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    there = [p for p in sys.path if p.endswith("site-packages")]
    (installed / "dependencies.pth").write_text("".join(f"{p}\n" for p in there))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    root = run(python, "-c", "import pathlib, tailbound; print(pathlib.Path(tailbound.__file__).parent)").stdout.strip()
    assert Path(root) == installed / "tailbound"
    doctor = run(home / "bin" / "tailbound", "doctor", "--interface", "lo")
    assert doctor.returncode == 0, doctor.stderr
    bench = run(home / "bin" / "tailbound", "bench")
    assert bench.returncode == 1
    assert "is in the package tailbound-lab: pip install" in bench.stderr


def test_the_laboratory_is_a_wheel_of_its_own(checkout: Path, tmp_path: Path) -> None:
    sources = {p.relative_to(checkout / "host_lib").as_posix() for p in (checkout / LABORATORY).rglob("*.py")}
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, checkout / LABORATORY)
    (found,) = tmp_path.glob("tailbound_lab-*.whl")
    with zipfile.ZipFile(found) as archive:
        names = set(archive.namelist())
        (entries,) = [n for n in names if n.endswith(".dist-info/entry_points.txt")]
        assert "tailbound_lab = tailbound_lab.lab.pytest_plugin" in archive.read(entries).decode()
    assert {n for n in names if n.endswith(".py")} == sources
