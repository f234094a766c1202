"""Stopping criteria: decide how many sampled tokens a request keeps, and its finish reason. Pure functions."""

from __future__ import annotations

from engine.plan import StepResult
from engine.request import FinishReason, Request, RequestOutput


def append_tokens(request: Request, result: StepResult, index: int) -> RequestOutput:
    """Append the tokens sampled by row `index`, up to the one that ends the request, if any."""
    output = RequestOutput(request, [])
    output_token_ids, logprobs = request.output_token_ids, result.logprobs[index]
    if not output_token_ids:
        output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
    params, eos_token_ids, max_output = request.params, request.eos_token_ids, request.max_output
    for offset, token_id in enumerate(result.token_ids[index]):
        output_token_ids.append(token_id)
        output.new_token_ids.append(token_id)
        if logprobs:
            output.logprobs.append(logprobs[offset])
        if token_id in eos_token_ids or token_id in params.stop_token_ids or len(output_token_ids) >= max_output:
            output.finish_reason, output.stop_token_id = _end_reason(request, token_id)
            if output.finish_reason is not None:
                break
    if output.finish_reason is None and request.prefill_only:
        output.finish_reason = FinishReason.PREFILLED
    return output


def is_full(request: Request) -> bool:
    """Whether the pending token is the request's last one, so that nothing is left to compute."""
    if not request.num_pending_tokens:
        return False
    if request.prefill_only:
        return True
    return len(request.output_token_ids) + request.num_pending_tokens >= request.max_output


def _end_reason(request: Request, token_id: int) -> tuple[FinishReason | None, int | None]:
    params = request.params
    is_eos = token_id in request.eos_token_ids
    is_stop = token_id in params.stop_token_ids or (is_eos and not params.ignore_eos)
    if (is_stop and len(request.output_token_ids) >= params.min_tokens) or (is_eos and params.grammar):
        return FinishReason.STOP, token_id
    if len(request.output_token_ids) >= request.max_output:
        return FinishReason.LENGTH, None
    return None, None
