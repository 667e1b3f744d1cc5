"""Starts on the masks of a step's grammars before its forward pass begins, so that they are there when it ends."""

from collections.abc import Callable, Sequence

from weir.engine.plan import LaunchingRunner, ModelRunner, StepPlan, StepResult
from weir.grammar.masks import GrammarState

BeginMasks = Callable[[Sequence[GrammarState]], None]


def masking_runner(runner: ModelRunner, begin: BeginMasks) -> ModelRunner:
    """`begin` gets the grammars of each step that has any. Launches steps if `runner` does."""
    if isinstance(runner, LaunchingRunner):
        return _LaunchingMaskingRunner(runner, begin)
    return _MaskingRunner(runner, begin)


class _MaskingRunner:
    def __init__(self, runner: ModelRunner, begin: BeginMasks) -> None:
        self._runner = runner
        self._begin = begin

    def run(self, plan: StepPlan) -> StepResult:
        self._begin_masks(plan)
        return self._runner.run(plan)

    def _begin_masks(self, plan: StepPlan) -> None:
        masks = [chunk.sample.mask for chunk in plan.chunks if chunk.sample is not None]
        states = [mask for mask in masks if isinstance(mask, GrammarState)]
        if states:
            self._begin(states)


class _LaunchingMaskingRunner(_MaskingRunner):
    def __init__(self, runner: LaunchingRunner, begin: BeginMasks) -> None:
        super().__init__(runner, begin)
        self._launch = runner.launch

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """A step with grammars is not planned ahead of the tokens before it (`weir.engine.batching.ahead`)."""
        self._begin_masks(plan)
        return self._launch(plan)
