"""Models of papers, typed from their tables; the parameters follow by formula."""

from __future__ import annotations

from pipelab.planner.model import Transformer

_MEGATRON = "Narayanan et al. 2021, arXiv 2104.04473, table 1"
_GPIPE = "Huang et al. 2019, arXiv 1811.06965, table 1: Transformer-L on accelerators of 16 GB"


def _megatron(name: str, heads: int, hidden: int, layers: int) -> Transformer:
    return Transformer(layers, hidden, heads, sequence=2048, vocabulary=51200, name=name, source=_MEGATRON)


def gpipe_transformer(layers: int) -> Transformer:
    """GPipe's Transformer-L: float32, two separate embeddings, 12 bytes a parameter."""
    return Transformer(
        layers,
        hidden=2048,
        heads=32,
        sequence=1024,
        vocabulary=32000,
        tied=False,
        learned_positions=False,
        bytes_per_value=4,
        state=(4, 4, 4),
        name=f"gpipe-{layers}",
        source=_GPIPE,
    )


PRESETS: dict[str, Transformer] = {
    model.name: model
    for model in (
        Transformer(
            96,
            12288,
            96,
            sequence=2048,
            vocabulary=51200,
            name="gpt3-175b",
            source="Brown et al. 2020, arXiv 2005.14165, table 2.1; vocabulary padded as in arXiv 2104.04473",
        ),
        _megatron("megatron-1.7b", 24, 2304, 24),
        _megatron("megatron-3.6b", 32, 3072, 30),
        _megatron("megatron-7.5b", 32, 4096, 36),
        _megatron("megatron-18b", 48, 6144, 40),
        _megatron("megatron-39b", 64, 8192, 48),
        _megatron("megatron-76b", 80, 10240, 60),
        _megatron("megatron-145b", 96, 12288, 80),
        _megatron("megatron-310b", 128, 16384, 96),
        _megatron("megatron-530b", 128, 20480, 105),
        _megatron("megatron-1t", 160, 25600, 128),
        *(gpipe_transformer(layers) for layers in (3, 13, 103, 415, 1663)),
    )
}
