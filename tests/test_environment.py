"""environment.yml, constraints.txt and pyproject.toml say one thing; they are written by hand, so they are compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"pytorch": "torch"}
NAMED_PACKAGES = {"jupyterlab", "torch", "matplotlib", "ipywidgets", "nbval", "sympy"}
PYTHONS = ("3.10.0", "3.11.2", "3.11.9", "3.12.3", "3.13.0")  # 3.11.2 is Debian 12's, 3.12.3 Ubuntu 24.04's

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
CONDA = [Requirement(line) for line in ENVIRONMENT["dependencies"] if isinstance(line, str)]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def test_environment_conda_ranges_are_those_of_pyproject() -> None:
    declared = {r.name: r.specifier for r in [*CORE, *EXTRAS["lab"]]}
    conda = {CONDA_NAMES.get(r.name, r.name): r.specifier for r in CONDA if r.name not in ("python", "pip")}
    assert conda == {name: declared[name] for name in conda}


def test_environment_conda_names_the_six_packages_and_installs_pipelab() -> None:
    assert {CONDA_NAMES.get(r.name, r.name) for r in CONDA} == NAMED_PACKAGES | {"python", "pip"}
    assert ENVIRONMENT["dependencies"][-1] == {"pip": ["-e .[lab]"]}


def test_environment_conda_python_is_one_that_the_package_takes() -> None:
    (conda,) = (r.specifier for r in CONDA if r.name == "python")
    package = SpecifierSet(PROJECT["requires-python"])
    assert [version for version in PYTHONS if version in conda] == ["3.11.2", "3.11.9"]  # the tested one
    assert all(version in package for version in PYTHONS)
    assert "3.9.19" not in package


def test_environment_core_stays_light() -> None:
    assert {r.name for r in CORE} == {"torch", "matplotlib", "ipywidgets", "sympy", "numpy", "cloudpickle"}


def test_environment_every_dependency_has_a_range() -> None:
    without = [r.name for r in [*CORE, *(r for extra in EXTRAS.values() for r in extra)] if not r.specifier]
    assert without == []


@pytest.mark.parametrize("python", PYTHONS)
def test_environment_one_pin_a_package_inside_its_range_for_each_python(python: str) -> None:
    where = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    pins: dict[str, str] = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate(where):
            name = canonicalize_name(pin.name)
            assert name not in pins, f"{name} is pinned twice for Python {python}"
            (equal,) = pin.specifier
            assert equal.operator == "=="
            pins[name] = equal.version
    wanted = [
        r
        for r in [*CORE, *(one for extra in EXTRAS.values() for one in extra)]
        if r.marker is None or r.marker.evaluate(where)
    ]
    outside = {r.name: pins.get(canonicalize_name(r.name)) for r in wanted if not _holds(r, pins)}
    assert outside == {}


def test_environment_torch_pin_accepts_a_build_with_a_local_version() -> None:
    (torch,) = (pin for pin in PINS if pin.name == "torch")
    (equal,) = torch.specifier
    assert f"{equal.version}+cpu" in torch.specifier


def _holds(requirement: Requirement, pins: dict[str, str]) -> bool:
    pin = pins.get(canonicalize_name(requirement.name))
    return pin is not None and pin in requirement.specifier
