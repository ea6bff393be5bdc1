"""Counts what vLLM's scheduler asks for in a step."""

from __future__ import annotations

from typing import Any


def resumed(scheduled: Any) -> int:
    """Return how many preempted requests with outputs start anew, as vLLM tells its first or second model runner."""
    again = [each for each in scheduled.scheduled_new_reqs if each.prefill_token_ids is not None]
    return len(scheduled.scheduled_cached_reqs.resumed_req_ids) + sum(
        len(each.prefill_token_ids) > len(each.prompt_token_ids) for each in again
    )
