"""The package as it is published: source archive, wheel, and an installation of it."""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import forebay
from daemon import PACKAGE


def run(*command, **options):
    """Returns what was printed; a failure shows it."""
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with an archive and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    run(
        *(sys.executable, "-m", "build", "--no-isolation"),
        *("--outdir", folder / "dist", folder / "source"),
    )
    return folder


def sources():
    """What a program that imports the package may need."""
    files = (path for path in (PACKAGE / "forebay").rglob("*") if path.suffix in (".py", ".typed"))
    return {path.relative_to(PACKAGE).as_posix() for path in files}


def test_archive_is_whole(built):
    (path,) = (built / "dist").glob("*.tar.gz")
    assert path.name == f"forebay-{forebay.__version__}.tar.gz"
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources() | {"pyproject.toml", "README.md"} <= names


def test_wheel_is_whole_and_pure(built):
    (path,) = (built / "dist").glob("*.whl")
    assert path.name == f"forebay-{forebay.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert "forebay/py.typed" in sources()
    assert {name for name in names if not name.startswith(f"{info}/")} == sources()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Requires-Dist") is None


def test_wheel_works_where_it_is_installed(built, tmp_path):
    (wheel,) = (built / "dist").glob("*.whl")
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python),
        *("install", "--no-deps", "--no-index", wheel),
    )
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    program = "import forebay; print(forebay.__file__, forebay.__version__, forebay.chain([1], 1))"
    printed = run(python, "-c", program, env=environment, cwd=tmp_path)
    where, version, chain = printed.split(maxsplit=2)
    assert where.startswith(str(tmp_path / "venv"))
    assert version == forebay.__version__
    assert chain.strip() == str(forebay.chain([1], 1))
