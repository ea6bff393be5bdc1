"""Runners that give back the memory of weights and caches for some time, as while a training loop needs it."""

from __future__ import annotations

from typing import get_args

from hal.checkpoint.weight_release import Kept, ReleasedWeights, dropped_weights
from hal.errors import BatchError, ConfigError, nearest
from hal.execution.runner import Runner
from hal.execution.sleep_state import Part, Sleep, Slept


def sleep(runner: Runner, *, weights: Kept = "host", caches: bool = True) -> Slept:
    """Give back the memory of a runner's weights and caches until :func:`wake`.

    Steps raise AsleepError meanwhile. What is cached is lost with the caches. Where the device can keep addresses, as a
    CPU on Linux can, graphs stay; elsewhere they are freed, too, and waking captures them again. No step of the runner
    may run meanwhile, and no sequence may hold blocks of its ``blocks`` or ``prefixes``.

    Args:
        runner: its model was loaded with :func:`hal.load_model`.
        weights: what is kept of them. ``device``: they stay where they are. ``host``: a copy in the host's memory, from
            which waking restores them; on a CPU, they stay. ``files``: nothing, and waking reads the checkpoint.
            ``none``: nothing, and :func:`hal.replace_weights` brings others after waking.
        caches: whether the caches sleep.

    Returns:
        What it gave back, and whether addresses are kept.

    Raises:
        AsleepError: it sleeps already.
        BatchError: sequences hold blocks of the caches.
        ConfigError: another runner has the model, whose weights would sleep; or ``weights`` is none of these, or is
            ``files``, and others than a whole checkpoint's replaced them.
        ModelError: :func:`hal.load_model` did not load the model.
        ClosedError: the runner is closed.
    """
    if weights not in get_args(Kept):
        raise ConfigError(f"weights is {weights!r:.70}", nearest(str(weights), get_args(Kept)), key="weights")
    model, device = runner.model, runner.backend.device
    with runner.running():
        runner.check_awake()
        others = (each for each in list(runner.backend.runners) if isinstance(each, Runner) and each is not runner)
        if weights != "device" and any(not each.closed and each.model is model for each in others):
            raise ConfigError(
                "another runner has the same model, whose weights are to sleep",
                'close it, or set weights to "device"',
            )
        if caches and (held := (runner.prefixes or runner.blocks).num_held):
            raise BatchError(
                f"sequences hold {held} blocks of the caches, which are to sleep",
                "finish or drop them first, or set caches to false",
            )
        device.synchronize()
        released = None if weights == "device" else ReleasedWeights(model, runner.backend, weights)
        parts: frozenset[Part] = frozenset({"caches"} if caches else ())
        runner.asleep = Sleep(parts if released is None else parts | {"weights"}, released)
        returned: int | None = 0
        if caches:
            runner.forget()
            returned = device.give_back(runner.states.pages or [each for _, each in runner.states.tensors()])
        stays = returned is not None and (released is None or released.addresses_kept)
        if not stays:
            runner.free_graphs(states=caches)
            returned = runner.spec.nbytes if caches else 0
        if released is not None:
            released.free()
        return Slept(0 if released is None else released.released, returned or 0, stays)


def wake(runner: Runner, part: Part | None = None) -> None:
    """Take memory again for what sleeps, and capture graphs again if their addresses were not kept.

    To bring other weights before the caches take memory, wake the weights, replace them, and wake the caches. A runner
    that does not sleep stays as it is.

    Args:
        runner: the runner.
        part: ``weights`` or ``caches``; None for all that sleeps.

    Raises:
        ConfigError: there is no such part; or the caches do not fit the device's memory.
        CheckpointError: the files of the weights cannot be read.
        DeviceOutOfMemory: the device has too little memory. Free some, and call it again.
        CaptureError, CompileError: as :class:`hal.Runner`.
        ClosedError: the runner is closed.
    """
    if part is not None and part not in get_args(Part):
        raise ConfigError(f"part is {part!r:.70}", nearest(str(part), get_args(Part)), key="part")
    with runner.uses:
        if (asleep := runner.asleep) is None:
            return
        if part != "caches" and asleep.weights is not None and "weights" in asleep.parts:
            with runner.running():
                asleep.weights.restore(runner.backend)
            asleep.parts -= {"weights"}
        if part != "weights":
            runner.remake(states=True)
            asleep.parts -= {"caches"}
        if not asleep.parts:
            runner.remake(states=False)  # as the constructor, outside inference mode
    end_sleep(runner)


def end_sleep(runner: Runner) -> None:
    """Let a runner run steps again, if nothing sleeps any more, and no weight is missing."""
    if runner.asleep is not None and not runner.asleep.parts and not dropped_weights(runner.model):
        runner.asleep = None
