"""What the chapters use and a library does not: a question that waits for the reader's own number, and a ruler.

    guess = predict("When does the last backward end?", answer=None, unit="units")   # one cell
    guess.reveal(trace.makespan, "Because ...", {24: "That counts ..."})              # another one, further down

Both show themselves as the value of a cell. Nothing raises and nothing waits for input, so Run All goes through with or
without a number. `plain_gradients` are what gradients should be, and `off` says how far others are from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import fsum, isclose, isfinite, sqrt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_TYPE_ONE = "Put a number in place of `None` and run this cell again; the answer comes further down."


@dataclass(frozen=True, repr=False)
class Text:
    """One paragraph that a cell shows: as markdown where that is possible, as plain text elsewhere."""

    text: str

    def _repr_markdown_(self) -> str:
        return f"> {self.text}"

    def __repr__(self) -> str:
        return self.text.replace("**", "").replace("`", "")


@dataclass(frozen=True, repr=False)
class Prediction(Text):
    """The reader's number for a question, until `reveal` lays the right one beside it.

    `number` is None where nothing was typed, or nothing that reads as a number.
    """

    number: float | None
    unit: str

    def reveal(
        self, right: Any, because: str, slips: Mapping[float, str] | None = None, *, within: float = 0.01
    ) -> Text:
        """The right number, how the reader's compares with it, and why it is so.

        `right` is what the cells above computed. `slips` says what a wrong number gives away; a number counts as right,
        or as that slip, from `within` times its size on. Without a number of the reader's the answer stands alone.
        """
        answer = _number(right)
        if answer is None:
            return Text(f"Nothing to compare with yet: {_shown(right)} is no number. Run the cells above first.")
        if self.number is None:
            return Text(f"**{self._write(answer)}.** You typed no number this time. {because}")
        if isclose(self.number, answer, rel_tol=within):
            return Text(f"**{self._write(answer)}: you have it.** {because}")
        off = self.number - answer
        slip = f"That is {self._write(abs(off))} too {'much' if off > 0 else 'little'}."
        for wrong, reading in (slips or {}).items():
            if isclose(self.number, wrong, rel_tol=within):
                slip = reading
        return Text(f"**{self._write(answer)}.** You said {_decimal(self.number)}. {slip} {because}")

    def _write(self, number: float) -> str:
        return f"{_decimal(number)} {self.unit}".rstrip()


def predict(question: str, answer: Any = None, *, unit: str = "") -> Prediction:
    """Ask `question`, and keep what the reader typed as `answer`: a number, or text such as "3/11" or "20 %".

    `unit` is written behind every number. The value shows the question, and the reader's number once there is one;
    `reveal` on it shows the answer.
    """
    number = _number(answer, unit)
    if answer is None:
        state = f"No number yet. {_TYPE_ONE}"
    elif number is None:
        state = f'{_shown(answer)} is no number; type one such as 7, 0.5 or "3/11". {_TYPE_ONE}'
    else:
        state = f"You say {_decimal(number)} {unit}".rstrip() + ". The answer comes further down."
    return Prediction(f"**Predict.** {question} {state}", number, unit)


def plain_gradients(model: Any, inputs: Any, targets: Any, loss_fn: Any, num_microbatches: int = 1) -> dict[str, Any]:
    """The gradients of training in one process, {name: gradient}: what those of a pipeline should be.

    `loss_fn` is a mean over samples. The batch is cut into `num_microbatches` equal parts, one after the other, so that
    sums are taken in a pipeline's order. The model is left without gradients.
    """
    model.zero_grad()
    for x, y in zip(inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True):
        (loss_fn(model(x), y) / num_microbatches).backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return found


def off(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """How far `found` is from `wanted`, tensors of equal shapes in equal order: the length of the difference of all
    together, as a share of the length of `wanted`. 0 where they are equal, 1 where `found` is all zeros.

    Raises ValueError where they are not equally many.
    """
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, wanted, strict=True)]
    difference = fsum(float((a - b).square().sum()) for a, b in pairs)
    return sqrt(difference / fsum(float(b.square().sum()) for _, b in pairs))


def _number(value: Any, unit: str = "") -> float | None:
    """`value` as a finite number, None where it is none."""
    if value is None or isinstance(value, bool):
        return None
    try:
        if isinstance(value, str):
            text = "".join(value.split())
            share = unit == "%" and "/" in text and not text.endswith("%")  # 3/19 of something, asked for in percent
            value = Fraction(text.removesuffix(unit)) * (100 if share else 1)
        number = float(value)
    except Exception:  # whatever the reader typed, a question is no place for a traceback
        return None
    return number if isfinite(number) else None


def _decimal(number: float) -> str:
    """A whole number in full, any other to four figures."""
    return f"{number:.0f}" if number == round(number) else f"{number:.4g}"


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = type(value).__name__
    return f"`{text[:40]}`"
