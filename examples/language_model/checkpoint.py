"""Checkpoints by orbax: everything that a bit-for-bit continuation needs."""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from language_model.config import Config, ConfigError, flag

# What must not change between a run and its continuation.
_FIXED = (
    *("batch", "seed", "window", "width", "layers", "heads"),
    *("learning_rate", "warmup", "corpus_bytes", "wire", "accumulate"),
)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
      step: steps taken.
      state: the train state, on the devices.
      place: where the data stands.
      history: losses so far, as JSON.
    """

    step: int
    state: Any
    place: dict[str, Any]
    history: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run; does nothing if the config names no directory.

    Orbax writes a checkpoint under a temporary name and renames it when it is complete, so an
    interrupt never leaves a broken one behind. Several processes write one together, into a
    directory that all of them see.
    """

    def __init__(self, config: Config) -> None:
        """Opens the directory.

        Raises:
          ConfigError: if there is nothing to resume, if it was written with other options, or if
            a new run would be mixed up with an old one.
        """
        self._config = config
        self._manager: ocp.CheckpointManager | None = None
        if config.checkpoint_dir is None:
            return
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        directory = config.checkpoint_dir.absolute()
        if config.resume and not directory.is_dir():
            raise ConfigError(
                f"--resume needs a checkpoint, but --checkpoint-dir {config.checkpoint_dir} does "
                "not exist; name the directory of an earlier run or leave out --resume"
            )
        try:
            self._manager = ocp.CheckpointManager(directory, options=options)
        except OSError as error:
            raise ConfigError(
                "--checkpoint-dir must be a directory that can be written, got "
                f"{config.checkpoint_dir} ({error.strerror})"
            ) from None
        self._check_latest()

    def _check_latest(self) -> None:
        found, where = self.latest(), f"--checkpoint-dir {self._config.checkpoint_dir}"
        if self._config.resume and found is None:
            raise ConfigError(
                f"--resume needs a checkpoint, but {where} holds none; name the directory of an "
                "earlier run or leave out --resume"
            )
        if not self._config.resume and found is not None:
            raise ConfigError(
                f"{where} already holds step {found}; pass --resume to continue from it or name "
                "an empty directory"
            )
        if found is not None:
            self._check_same_options(found)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        if self._manager is None:
            return None
        # From the disk, not from what the manager remembers of a save that was interrupted.
        return max(self._manager.all_steps(read=True), default=None)

    def due(self, step: int) -> bool:
        """Whether one is to be written after this step."""
        last = step == self._config.steps
        return self._manager is not None and (last or step % self._config.checkpoint_every == 0)

    def save(self, step: int, state: Any, place: dict[str, Any], history: dict[str, Any]) -> None:
        """Writes a checkpoint and returns when it is complete."""
        if self._manager is None or self.latest() == step:
            return
        fixed = {name: getattr(self._config, name) for name in _FIXED}
        rest = {"place": place, "history": history, "config": fixed}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), rest=ocp.args.JsonSave(rest)
            ),
        )

    def restore(self, like: Any, shardings: Any) -> Restored:
        """Reads the newest checkpoint.

        Args:
          like: the shapes of the state.
          shardings: where to put it.
        """
        step = self.latest()
        assert self._manager is not None, "restore needs --checkpoint-dir"
        assert step is not None, "restore needs a checkpoint"
        shapes = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            like,
            shardings,
        )
        template = ocp.args.StandardRestore(shapes)
        state = self._manager.restore(step, args=ocp.args.Composite(state=template)).state
        rest = self._read_rest(step)
        return Restored(step, state, rest["place"], rest["history"])

    def _read_rest(self, step: int) -> dict[str, Any]:
        assert self._manager is not None
        json = ocp.args.Composite(rest=ocp.args.JsonRestore())
        return self._manager.restore(step, args=json).rest

    def _check_same_options(self, step: int) -> None:
        saved = self._read_rest(step)["config"]
        for name in _FIXED:
            now = getattr(self._config, name)
            # Checkpoints from before there was such an option were made with its default.
            then = saved.get(name, getattr(Config, name))
            if now != then:
                raise ConfigError(
                    f"{flag(name)} must be {then}, as in the checkpoint of --resume, got {now}"
                )
        if step > self._config.steps:
            raise ConfigError(
                f"--steps must be at least {step}, the step of the checkpoint of --resume, "
                f"got {self._config.steps}"
            )

    def __enter__(self) -> Checkpoints:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the directory."""
        if self._manager is not None:
            self._manager.close()
