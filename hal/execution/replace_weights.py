"""New weights for a runner that keeps its graphs, as for the rollouts of a training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.weight_replacement import replace_tensors
from hal.execution.runner import Runner
from hal.execution.sleep import end_sleep

NewWeights = str | Path | Checkpoint | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Where new weights are: tensors by name, or a checkpoint or its folder."""


def replace_weights(runner: Runner, tensors: NewWeights) -> None:
    """Write new values into the weights of a runner's model, in place.

    Captured graphs, compiled code and other runners of the model use them in the next step. All tensors of a mapping
    are checked first: an error leaves the model unchanged. Cached prefixes and embeddings are dropped. Keys and values
    of running sequences stay as the former weights computed them.

    No runner of the model may run a step meanwhile. If ranks share the model, each passes the same whole tensors, and
    keeps its part.

    Args:
        runner: its model was loaded with :func:`hal.load_model`.
        tensors: whole tensors by their names in the checkpoint, on any device, in a dtype that the checkpoint could
            have. Tensors that are merged into one, such as the query, key and value projections of a layer, are passed
            together, and so are all tensors of a quantized layer. Other tensors may be left out. An iterable of names
            and tensors is read once, and each tensor is copied before the next is taken: an error leaves the model
            partly replaced. So does one of a checkpoint, which is opened if it is a folder or a name of the hub.

            A floating-point weight of a layer that the checkpoint quantizes is quantized here, in the checkpoint's
            form. In place of the projections of experts, one tensor ``[num_experts, out_features, in_features]`` may
            be given for all, by transformers' name.

    Raises:
        CheckpointError: a name is unknown, a shape or dtype does not fit, a part of a merged tensor is missing, or a
            weight cannot be quantized in the checkpoint's form; or the checkpoint is missing, damaged or unsafe.
        ModelError: :func:`hal.load_model` did not load the model.
        AsleepError: the weights sleep.
        ClosedError: the runner is closed.
    """
    backend = runner.backend
    if isinstance(tensors, str | Path):
        tensors = Checkpoint.open(tensors)
    with runner.running():
        backend.device.synchronize()  # Steps may still run.
        if runner.asleep is not None and "weights" in runner.asleep.parts:
            runner.check_awake()
        try:
            replace_tensors(runner.model, backend, tensors)
        finally:
            backend.device.synchronize()  # The caller may change its tensors.
            for each in list(backend.runners):
                if isinstance(each, Runner) and not each.closed and each.model is runner.model:
                    each.forget()
                    end_sleep(each)
