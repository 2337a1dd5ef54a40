"""How a rank ends a step, or leaves one that a lost rank has broken."""

from __future__ import annotations

from trainwright.tasks.train.passes import keyed_dropout
from trainwright.tasks.train.rank.rank_noise import RankNoise
from trainwright.tasks.train.rank.step_sums import FinishedStep, StepSums


class RankUpdates(RankNoise):
    """Updates the parameters, and averages them if the layout does."""

    _skip = False
    """whether `update` skips this step: a gradient overflowed, or no sample has a weight"""
    _has_gradients = False
    """whether a stage has all gradients of a step that it has not ended"""
    _summed: tuple[StepSums, int] | None = None
    """of the current step, and its samples"""
    finished_step: FinishedStep | None = None
    """the last one, if this rank has ended it"""
    fits = 0
    """the largest batch of this rank in a finished step"""
    computing_since: float | None = None
    """when the current step began (time.monotonic); None between steps and in the first one

    The first step takes longer, since libraries initialise themselves.
    """

    def abandon_step(self) -> None:
        """Leave an unfinished step, and undo its changes.

        Not if the rank may still end it: then `end_step` or `drop_step` follows.
        """
        self.computing_since = None
        keyed_dropout.end_pass()
        if self.emulated is not None:
            self.emulated.stop()
        self.model.train()
        if not self._has_gradients:
            self.drop_step()

    @property
    def may_end_step(self) -> bool:
        """Whether this rank has all gradients of an unfinished step, as a stage of a pipeline."""
        return self._has_gradients

    def drop_step(self) -> None:
        """Undo the changes of an unfinished step: the forward pass updates running statistics."""
        if self._before_step is not None:
            for module, name, value in self._before_step:
                module._buffers[name].copy_(value)  # type: ignore[union-attr]
        self._before_step, self._summed, self._has_gradients = None, None, False
        self._gradients.begin()
        self._layout.begin()

    def end_step(self, as_finished: FinishedStep) -> None:
        """End a step as another rank has ended it, if `may_end_step`."""
        if self._summed is None:
            sums, total = as_finished.sums, as_finished.samples
            self._layout.share = self._share_of(sums)
            self._layout.finish(sums.factor(total))
            self._gradients.finish(sums.used, sums.factor(total))
            self._note(sums, total)
        self.update(as_finished.learning_rate, as_finished.norm_square)

    def _own_weight(self, sums: StepSums) -> float:
        """w_r of this rank, or of its pipeline."""
        return sums.weights[self._counted_as]

    def _share_of(self, sums: StepSums) -> float:
        """w_r / W of this rank."""
        return self._own_weight(sums) / sums.weight if sums.weight else 0.0

    def _note(self, sums: StepSums, total: int) -> None:
        """The gradients are complete: what the update and the noise scale need of the sums."""
        self._summed = sums, total
        self._skip = (self._scales and sums.overflows > 0) or not sums.weight
        self._noise.scale.complete(sums.joint_square)
        self._noise.begin(
            sums.spread(total),
            total,
            0 if self._skip else sums.ranks,
            self._gradients.joint_square() + self._layout.joint_square,
            self._layout.rows_square,
        )

    def update(self, learning_rate: float, norm_square: float | None = None) -> None:
        """Run the optimizer with the summed gradients.

        Not if a scaled gradient overflowed, or nothing in the batch has a weight in the loss. Ranks
        that train alone have done that. The step is then complete: `average_if_due` follows.
        `norm_square`: |g|² of all ranks, if it is known; None: they sum it to clip by it.
        """
        self.actions.done(None)
        if not self.alone and not self._skip:
            norm_square = self._optimizer_step(learning_rate, norm_square)
        self.actions.done("update")
        if self.averaging is not None:
            joint = None if self.alone else self._summed
            self.averaging.step_done(0.0 if joint is None else self._own_weight(joint[0]))
        if self._scales:
            overflows = self._summed[0].overflows if self._summed is not None else 0
            self.loss_scale.after_step(overflowed=overflows > 0)
        if self._summed is not None:
            sums, samples = self._summed
            self.finished_step = FinishedStep(
                sums=sums, samples=samples, norm_square=norm_square, learning_rate=learning_rate
            )
        self._before_step, self._summed, self._has_gradients = None, None, False
        self.fits = max(self.fits, self._batch_size)

    def average_if_due(self) -> None:
        """Average the layers that are averaged, if it is time. All ranks call it after `update`.

        If a rank is lost meanwhile, the average is done when the next group forms.
        """
        if self.averaging is None or not self.averaging.due:
            return
        with self.actions.averaging():
            self.averaging.average()

    def average(self, *, moments: bool = False) -> bool:
        """Give all ranks the same parameters, if some are averaged. All ranks call it at once.

        Returns whether they differed.
        """
        if self.averaging is None:
            return False
        with self.actions.averaging():
            return self.averaging.average(moments=moments)
