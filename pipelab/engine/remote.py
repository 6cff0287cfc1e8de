"""A pipeline's parts on the ranks, as the notebook reaches them: one call on all of them, while they are there."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from pipelab.engine import resident
from pipelab.engine.recipe import Recipe
from pipelab.errors import EngineError, RankError
from pipelab.ranks import Ranks
from pipelab.ranks.pickling import dump_call

_keys = itertools.count()
_gone: weakref.WeakKeyDictionary[Ranks, list[int]] = weakref.WeakKeyDictionary()  # pipelines that ranks may forget


class Remote:
    """The part that every rank makes from its recipe.

    Ranks that were started again have no parts: then it is over, and `over` says why. What nobody holds any more is
    forgotten on the ranks when they are asked for the next pipeline.
    """

    def __init__(self, ranks: Ranks, recipes: Sequence[Recipe]) -> None:
        self.over = ""
        self._ranks, self.key = ranks, next(_keys)
        forgotten = _gone.setdefault(ranks, [])
        try:
            ranks.run_each(resident.settle, [(self.key, recipe, tuple(forgotten)) for recipe in recipes])
        except RankError:
            _check_parts(recipes)
            raise
        forgotten.clear()
        self._generation = ranks.generation
        self._finalizer = weakref.finalize(self, forgotten.append, self.key)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """`method` of every part, each with its own arguments, or all with none; the results in rank order.

        Raises RankError with the error of the rank that failed, or EngineError where it is one of the engine's.
        """
        self.check_open()
        each = arguments or [()] * self._ranks.num_ranks
        try:
            return self._ranks.run_each(resident.call, [(self.key, method, *mine) for mine in each])
        except BaseException as error:
            if not self._there:
                self.over = f"its {method} failed ({_first_line(error)})"
            if isinstance(error, RankError) and error.exception_type == EngineError.__qualname__:
                raise EngineError(str(error)) from error
            raise

    def close(self) -> None:
        """Let the ranks forget their parts."""
        if not self.over:
            self.over = "it was closed"
            self._finalizer.detach()
            if self._there:
                self._ranks.run(resident.leave, [self.key])

    def check_open(self) -> None:
        """Raise EngineError, with the way on, where it is over."""
        if not self.over and not self._there:
            self.over = "its ranks ended or were started again"
        if self.over:
            raise EngineError(
                f"this pipeline is over, because {self.over}. Build it again with Pipeline(model, schedule, ...); "
                "to go on from earlier values, take Pipeline.load(path, model, schedule, ...) with the path of a "
                "checkpoint, or give the new one a state_dict() of before by load_state_dict()"
            )

    @property
    def _there(self) -> bool:
        return self._ranks.alive and self._ranks.generation == self._generation


def _check_parts(recipes: Sequence[Recipe]) -> None:
    """Raise EngineError for the first function or layer of the user that cannot be sent, and say why."""
    for recipe in recipes:
        parts = {name: getattr(recipe.options, name) for name in ("loss_fn", "optimizer", "scheduler")}
        for _, layers in recipe.layers.values():
            parts |= {f"layer {name}": layer for name, layer in layers.named_children()}
        for name, part in parts.items():
            try:
                dump_call(part, (), {})
            except RankError as error:
                raise EngineError(f"{name}: {error}") from None


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__qualname__).splitlines()[0]
