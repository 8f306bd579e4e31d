"""Fields of OpenAI's, vLLM's and their relatives' that nobody here obeys.

A request whose answer they would change is refused: to ignore them would be to answer another request.  What
changes no answer (`metadata`, `store`, `prediction`) is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STRUCTURED = "say structured_outputs or response_format"
MAX_TOKENS = "say max_tokens"
FILTERS = "tokens are filtered by top_k, top_p and min_p alone"
TEMPLATE = "say chat_template_kwargs"
CHATS = "this route has no chat; /v1/chat/completions has"
UNSERVED = {  # and what to do instead, on every route
    "add_special_tokens": "the chat template has put them where they belong",
    "audio": "answers are text",
    "best_of": "as many answers are made as are returned; leave it out, or let it equal n",
    "chat_template": "templates come with the model or with --chat-template, never from a request",
    "container": "this server runs no code",
    "context_management": "the whole conversation is the prompt",
    "custom_logit_processor": "this server runs no code of a request's",
    "dry_multiplier": "use a repetition_penalty",
    "dynatemp_range": "temperature stays as it is",
    "ebnf": STRUCTURED,
    "enable_thinking": TEMPLATE,
    "function_call": "say tool_choice",
    "functions": "say tools",
    "grammar": STRUCTURED,
    "json_schema": STRUCTURED,
    "kv_transfer_params": "there is no other engine to take prompts from",
    "length_penalty": "tokens are sampled, and no beams compared",
    "logits_processors": "this server runs no code of a request's",
    "logprob_token_ids": "logprobs are those of the most likely tokens",
    "lora_path": "name the adapter as `model`, see /v1/load_lora_adapter",
    "max_new_tokens": MAX_TOKENS,
    "mcp_servers": "this server calls no other",
    "mirostat": FILTERS,
    "modalities": "answers are text",
    "n_predict": MAX_TOKENS,
    "prompt_embeds": "give text or token ids as prompt",
    "regex": STRUCTURED,
    "repeat_penalty": "say repetition_penalty",
    "repetition_detection": "use a repetition_penalty, or max_tokens",
    "return_hidden_states": "answers are text",
    "return_prompt_text": "/tokenize and /detokenize show prompts",
    "return_token_offsets": "logprobs have them as text_offset",
    "stop_regex": "say stop",
    "thinking_token_budget": "an answer thinks as long as it likes, up to max_tokens",
    "typical_p": FILTERS,
    "use_beam_search": "tokens are sampled; temperature 0 takes the most likely ones",
    "vllm_xargs": "there are no such arguments here",
    "web_search_options": "this server calls no other",
    "xtc_probability": FILTERS,
}
OPENAI_CHAT = {  # of others' chats, where OpenAI's are answered
    "output_config": "say response_format or reasoning_effort",
    "output_format": "say response_format",
    "prompt": "say messages; /v1/completions takes prompts",
    "reasoning": "say reasoning_effort",
    "stop_sequences": "say stop",
    "suffix": "the text always goes on behind the prompt",
    "system": "say it in messages",
    "thinking": TEMPLATE,
}
COMPLETION = {  # of chats, where prompts are completed
    **dict.fromkeys(
        (
            *("messages", "system", "tools", "tool_choice", "thinking", "reasoning", "reasoning_effort"),
            *("documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
        ),
        CHATS,
    ),
    "max_completion_tokens": MAX_TOKENS,
    "output_config": "say response_format",
    "stop_sequences": "say stop",
    "top_logprobs": "say logprobs, a number here",
}
MESSAGES = {  # of OpenAI's, where Anthropic's are answered
    **dict.fromkeys(
        (
            *("seed", "logit_bias", "logprobs", "top_logprobs", "min_p", "presence_penalty"),
            *("frequency_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"),
            *("allowed_token_ids", "bad_words", "prompt_logprobs", "skip_special_tokens", "echo"),
            *("include_stop_str_in_output", "cache_salt", "return_token_ids", "truncate_prompt_tokens"),
            *("documents", "add_generation_prompt", "continue_final_message", "structured_outputs"),
        ),
        "this route has Anthropic's fields; /v1/chat/completions has it",
    ),
    "max_completion_tokens": MAX_TOKENS,
    "n": "one answer is made",
    "output_format": "say output_config",
    "parallel_tool_calls": "say disable_parallel_tool_use in tool_choice",
    "prompt": "say messages; /v1/completions takes prompts",
    "reasoning_effort": "say thinking",
    "response_format": "say output_config",
    "stop": "say stop_sequences",
    "suffix": "the text always goes on behind the prompt",
}
RESPONSES = {  # of chats, where responses are made
    **dict.fromkeys(
        (
            *("logit_bias", "logprobs", "stop_token_ids", "min_tokens", "allowed_token_ids"),
            *("bad_words", "prompt_logprobs", "skip_special_tokens", "echo", "include_stop_str_in_output"),
            *("return_token_ids", "truncate_prompt_tokens", "documents", "add_generation_prompt"),
            *("continue_final_message", "structured_outputs"),
        ),
        "this route has fields of its own; /v1/chat/completions has it",
    ),
    "conversation": "say previous_response_id",
    "max_completion_tokens": "say max_output_tokens",
    "max_tokens": "say max_output_tokens",
    "messages": "say input",
    "n": "one answer is made",
    "prompt": "say input and instructions; prompts are not stored here",
    "reasoning_effort": "say reasoning",
    "response_format": "say text",
    "suffix": "the text always goes on behind the prompt",
    "system": "say instructions",
}
ALL = UNSERVED | OPENAI_CHAT | COMPLETION | MESSAGES | RESPONSES
OLDER = "guided_"  # what the names of structured_outputs in vLLM began with
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}  # Claude Code says so in every request
HARMLESS: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "context_management": ({"edits": []}, {"edits": [KEEP_ALL]}),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "tool_choice": ("none",),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
ASKED_BY_FALSE = {"enable_thinking", "skip_special_tokens", "add_generation_prompt", "parallel_tool_calls"}


def check_served(
    extra: Mapping[str, object], others: Mapping[str, str] = MappingProxyType({}), *, n: int = 1
) -> None:
    """Raise ValueError, beginning with its name, for a field that asks for what nobody does.

    extra: fields that the request's model does not have; None, False and what is empty ask for nothing.
    others: that other routes serve, and what to do instead on this one.
    """
    for name, value in extra.items():
        if name.startswith(OLDER) and value is not None:  # an empty schema is one of anything
            raise ValueError(f"{name} is not supported: {STRUCTURED}")
        way_out = others.get(name) or UNSERVED.get(name)
        if way_out is not None and not _is_harmless(name, value, n):
            raise ValueError(f"{name} is not supported: {way_out}")


def _is_harmless(name: str, value: object, n: int) -> bool:
    if value is None or (value is False and name not in ASKED_BY_FALSE) or value in ("", [], {}):
        return True
    return value == n if name == "best_of" else value in HARMLESS.get(name, ())
