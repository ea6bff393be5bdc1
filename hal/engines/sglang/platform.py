"""The platform: what SGLang asks before a model exists. hal owns the devices; SGLang sees a host without any."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

import hal
from hal.engines.sglang import PLATFORM
from hal.engines.sglang.server_args import check, check_checkpoint, configuration
from hal.errors import ModelError


class HalPlatform(CpuDeviceMixin, SRTPlatform):
    """Runs models on the hal backend that ``--json-model-override-args '{"hal": {...}}'`` configures."""

    _enum = PlatformEnum.OOT
    device_name = PLATFORM
    device_type = "cpu"
    capabilities = PlatformCapabilities()  # hal captures its own graphs.

    def get_device(self, device_id: int = 0) -> str:
        """Return where SGLang's own tensors are."""
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Leave attention, graphs and the size of pages to hal.

        Raises:
            ConfigError: the arguments ask for what hal does not support, or hal's configuration is invalid.
            CheckpointError: the checkpoint is damaged, or hal has no model for it.
            ModelError: hal does not run the model inside SGLang.
        """
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase  # imports this module

        check(server_args)
        config = configuration(server_args)
        check_checkpoint(server_args.model_path, config)
        if server_args.page_size is None:
            with hal.open(config, activate=False) as backend:
                server_args.page_size = backend.block_size
        graphs = server_args.cuda_graph_config
        for phase in Phase.ALL:
            graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
        server_args.cuda_graph_config = graphs
        server_args.attention_backend = PLATFORM
        server_args.disable_overlap_schedule = True  # Logits are on the host when a step ends.

    def get_default_attention_backend(self) -> str:
        """Return the name of the attention backend that leaves attention to hal."""
        return PLATFORM

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Return the backend of torch.compile for SGLang's own small functions: Inductor would take minutes."""
        return "eager"

    def init_backend(self) -> None:
        """Register that attention backend."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from hal.engines.sglang.cache import HalAttention

        register_attention_backend(PLATFORM)(HalAttention)

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Return a pool without memory for keys and values. hal's models are refused if they keep anything else."""
        from hal.engines.sglang.cache import HalTokenPool

        return HalTokenPool if kind == "mha" else None

    def post_load_model(self, model: Any) -> None:
        """Check that the model is hal's.

        Raises:
            ModelError: hal has no model of this architecture, so that SGLang loaded its own.
        """
        from hal.engines.sglang.model import HalForCausalLM

        if not isinstance(model, HalForCausalLM):
            raise ModelError(
                f"hal has no model {type(model).__name__}, and SGLang loaded its own",
                "register one in the entry-point group hal.models, or unset SGLANG_PLATFORM",
            )
