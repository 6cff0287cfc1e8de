"""A few pictures that the browser shows one after another by itself, so that a film does not wait for the kernel."""

from __future__ import annotations

from collections.abc import Sequence

_STYLE = "<style>@keyframes pl-shown {from, to {visibility: visible}}</style>"


def reel(pictures: Sequence[str], frame_ms: float) -> str:
    """HTML that shows every one of `pictures`, which are HTML of one size, for `frame_ms` milliseconds.

    The first is seen at once, the last one stays. What is not seen is hidden from screen readers and the mouse too.
    """
    if len(pictures) == 1:
        return pictures[0]
    last = len(pictures) - 1
    frames = (
        f'<div style="grid-area: 1 / 1; visibility: hidden; animation: pl-shown {frame_ms:g}ms {n * frame_ms:g}ms'
        f'{" forwards" if n == last else ""}">{picture}</div>'
        for n, picture in enumerate(pictures)
    )
    return f'{_STYLE}<div style="display: grid">{"".join(frames)}</div>'
