"""The letters of all formulas: a symbol each, and what it means."""

from __future__ import annotations

from sympy import Symbol

MEANING: dict[Symbol, str] = {}


def _count(name: str, meaning: str, *, zero: bool = False) -> Symbol:
    symbol = Symbol(name, integer=True, nonnegative=True) if zero else Symbol(name, integer=True, positive=True)
    MEANING[symbol] = meaning
    return symbol


def _amount(name: str, meaning: str) -> Symbol:
    symbol = Symbol(name, nonnegative=True)
    MEANING[symbol] = meaning
    return symbol


p = _count("p", "ranks")
m = _count("m", "micro-batches")
v = _count("v", "stages per rank")
r = _count("r", "a rank, from 0", zero=True)

F = _amount("F", "time of a forward on a whole rank")
B = _amount("B", "time of a full backward on a whole rank, I + W")
I = _amount("I", "time of the input-gradient half of B")  # noqa: E741  the field's letter
W = _amount("W", "time of the weight-gradient half of B")
O = _amount("O", "time of a forward and a backward of one stage that run as one overlapped block")  # noqa: E741
c = _amount("c", "one-way delay of a hop between ranks")
x = _amount("x", "time of the slowest stage over the mean of all stages")
w = _amount("w", "part of an activation that is kept from I to W")

T = _amount("T", "time of a whole mini-batch on one rank, forward and backward")
o = _amount("o", "fixed overhead of a micro-batch on a rank")
N = _count("N", "samples in a mini-batch, over all replicas")
b = _count("b", "samples in a micro-batch")
d = _count("d", "data-parallel replicas")
g = _count("g", "mini-batches accumulated into one update")

L = _count("L", "layers: of the model, or of one rank where the formula says so")
n = _count("n", "parameters of the whole model")
s = _count("s", "tokens in a sequence")
h = _count("h", "hidden size")
a = _count("a", "attention heads")
e = _count("e", "bytes of an element")
S = _count("S", "segments that a rank's layers are recomputed in")

i = _count("i", "a micro-batch, from 0", zero=True)
t = _count("t", "updates between reading a weight and applying its gradient", zero=True)

BY_NAME: dict[str, Symbol] = {symbol.name: symbol for symbol in MEANING}
