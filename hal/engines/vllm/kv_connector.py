"""vLLM's KV connector for hal: one instance computes a prompt, and another continues it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

import hal
from hal.engines.vllm.prefix_folder import PrefixFolder
from hal.engines.vllm.request import Request
from hal.engines.vllm.vllm_config import CONNECTOR
from hal.execution.prefix_transfer import CachedPrefix, read_states, write_states


def register() -> None:
    """Let ``--kv-transfer-config`` name the connector."""
    with suppress(ValueError):  # vLLM asks more than once in a process.
        KVConnectorFactory.register_connector(CONNECTOR, __name__, HalConnector.__name__)


@attrs.frozen
class FolderMetadata(KVConnectorHandshakeMetadata):
    """The folder of the worker, which knows the form of its prefixes, for the scheduler."""

    folder: PrefixFolder


@attrs.frozen
class Transfers(KVConnectorMetadata):
    """What the worker moves in a step.

    Attributes:
        loads: by request, the prefix to read, and how many of its tokens are in the cache.
        saves: the requests whose prompts the step completes.
    """

    loads: dict[str, tuple[CachedPrefix, int]] = attrs.field(factory=dict)
    saves: list[str] = attrs.field(factory=list)


class HalConnector(KVConnectorBase_V1):
    """The part of the connector in vLLM's scheduler. :class:`PrefixMover` is that in hal's worker.

    Prompts with adapters, images or a salt of the cache are computed as without a connector.
    """

    requires_kv_delivery = False  # A prompt without a prefix is computed.

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder: PrefixFolder | None = None
        self._found: dict[str, tuple[CachedPrefix, int]] = {}
        self._unsaved: dict[str, int] = {}
        self._transfers = Transfers()

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Take the folder."""
        self._folder = metadata[0].folder

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens of a prefix follow those in the cache, and that they are read in the step itself."""
        if self._folder is None or not self._kv_transfer_config.is_kv_consumer or not _travels(request):
            return 0, False
        found = self._found.get(request.request_id)
        prefix = self._folder.find(request.prompt_token_ids, num_computed_tokens) if found is None else found[0]
        if prefix is None or len(prefix.tokens) <= num_computed_tokens:
            self._found.pop(request.request_id, None)
            return 0, False
        self._found[request.request_id] = prefix, num_computed_tokens
        return len(prefix.tokens) - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note what a request reads, which has blocks for it now, and whether its prompt will be saved."""
        found = self._found.pop(request.request_id, None)
        if num_external_tokens and found is not None:
            self._transfers.loads[request.request_id] = found
        if self._kv_transfer_config.is_kv_producer and _travels(request):
            self._unsaved[request.request_id] = request.num_prompt_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        """Return what the worker moves in a step."""
        transfers, self._transfers = self._transfers, Transfers()
        cached = scheduler_output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {each.req_id: each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs}
        for name, count in scheduler_output.num_scheduled_tokens.items():
            if name in self._unsaved and before[name] + count >= self._unsaved[name]:
                del self._unsaved[name]
                transfers.saves.append(name)
        return transfers

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request. Its blocks are not needed: what is saved is saved within a step."""
        self._found.pop(request.request_id, None)
        self._unsaved.pop(request.request_id, None)
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: hal's worker reads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: hal's worker reads before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: hal's worker writes after the step."""

    def wait_for_save(self) -> None:
        """Do nothing: hal's worker has written."""


def _travels(request: Any) -> bool:
    return not (request.lora_request or request.mm_features or request.cache_salt)


class PrefixMover:
    """Moves prefixes between the blocks of a runner and a folder.

    Args:
        config: vLLM's ``kv_transfer_config``, which was checked.

    Raises:
        ConfigError, ModelError: as :meth:`PrefixFolder.of`.
    """

    def __init__(self, runner: hal.Runner, config: Any) -> None:
        self.folder = PrefixFolder.of(runner, config.kv_connector_extra_config)
        self._runner = runner
        self.read = self.written = 0
        """The tokens that were read, and the bytes that were written."""

    def load(self, transfers: Transfers, requests: Sequence[Request]) -> None:
        """Read prefixes into the blocks of a step's requests, before the step."""
        size = self._runner.spec.block_size
        for each in requests:
            if each.name in transfers.loads:
                prefix, start = transfers.loads[each.name]
                write_states(
                    self._runner, prefix, each.blocks[0][start // size : len(prefix.tokens) // size], start=start
                )
                self.read += len(prefix.tokens) - start

    def save(self, transfers: Transfers, requests: Sequence[Request]) -> None:
        """Write the prefixes of a step's requests into the folder, after the step."""
        for each in requests:
            tokens = self.folder.shared(each.prompt)
            if each.name in transfers.saves and tokens and not self.folder.has(tokens):
                states = read_states(self._runner, each.blocks[0][: len(tokens) // self._runner.spec.block_size])
                self.written += self.folder.keep(CachedPrefix(self.folder.form.model, tuple(tokens), states))
