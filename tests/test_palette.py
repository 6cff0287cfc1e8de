"""The palette holds for readers who see few colours, or none."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from pipelab import palette
from pipelab.action import Kind

# Machado, Oliveira and Fernandes 2009, "A physiologically-based model for simulation of color vision deficiency",
# severity 1, for linear RGB
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
PROTANOPIA = np.array(
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
)
# IEC 61966-2-1: linear sRGB to CIE XYZ, white D65
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
PAIRS = list(combinations(Kind, 2))


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE 1976 L*a*b*, in which a distance of 2.3 is just seen and 10 is seen at a glance."""
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(axis=1)
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["full", "deuteranopia", "protanopia"])
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=str)
def test_palette_kinds_differ_for_colour_blind_readers(one: Kind, other: Kind, sight: np.ndarray) -> None:
    seen = [lab(sight @ linear(palette.COLOURS[kind])) for kind in (one, other)]
    assert np.linalg.norm(seen[0] - seen[1]) >= 15


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=str)
def test_palette_kinds_differ_in_grey(one: Kind, other: Kind) -> None:
    lightness = [lab(linear(palette.COLOURS[kind]))[0] for kind in (one, other)]
    assert abs(lightness[0] - lightness[1]) >= 12


@pytest.mark.parametrize("depths", [1, 2, 4])
@pytest.mark.parametrize("kind", list(Kind), ids=str)
def test_palette_numbers_read_on_every_shade(kind: Kind, depths: int) -> None:
    for depth in range(depths):
        bar = palette.shade(kind, depth, depths)
        light, dark = sorted((palette.luminance(bar), palette.luminance(palette.ink_on(bar))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.1, 1.4.3, level AA


def test_palette_shades_grow_lighter_and_keep_the_order_of_the_kinds() -> None:
    shades = {kind: [lab(linear(palette.shade(kind, depth, 4)))[0] for depth in range(4)] for kind in Kind}
    assert all(row == sorted(set(row)) for row in shades.values())
    for darker, lighter in pairwise([Kind.U, Kind.W, Kind.F, Kind.B, Kind.I]):
        assert shades[darker][-1] < shades[lighter][0] - 4


@pytest.mark.parametrize("sight", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["full", "deuteranopia", "protanopia"])
@pytest.mark.parametrize("kind", [Kind.F, Kind.B, Kind.I, Kind.W], ids=str)
def test_palette_two_virtual_stages_are_told_apart(kind: Kind, sight: np.ndarray) -> None:
    near, far = (lab(sight @ linear(palette.shade(kind, depth, 2))) for depth in range(2))
    assert np.linalg.norm(near - far) >= 10


def test_palette_luminance_is_that_of_the_standard() -> None:
    assert palette.luminance("#ffffff") == pytest.approx(1.0)
    assert palette.luminance("#000000") == 0.0
    assert palette.luminance("#808080") == pytest.approx(0.2159, abs=1e-4)
