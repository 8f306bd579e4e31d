"""Options of vLLM's that scripts pass and that change nothing here: taken with a notice, and not obeyed.

Only what changes no answer and takes nothing away that a user relies on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)
ALONE = "nothing of the kind is needed here"
NO_LOG = "this server writes no such log"
ENGINE = {  # and why
    "async_scheduling": "host and device always overlap, see depth",
    "block_manager": ALONE,
    "compilation_config": "kernels are compiled as the model needs them",
    "cuda_graph_sizes": "sizes follow from max_num_seqs",
    "disable_async_output_proc": ALONE,
    "disable_custom_all_reduce": "sums between ranks are chosen by how GPUs are connected",
    "disable_log_stats": "statistics are logged by a server with --verbose alone",
    "enable_sleep_mode": "every engine can sleep: POST /sleep, or LLM.sleep()",
    "guided_decoding_backend": "there is one, xgrammar",
    "limit_mm_per_prompt": "prompts are text",
    "max_parallel_loading_workers": ALONE,
    "max_seq_len_to_capture": "graphs serve all lengths",
    "num_scheduler_steps": "steps are planned one by one, ahead of the device",
    "swap_space": "preempted requests are computed anew, nothing is swapped",
    "tokenizer_mode": "there is one, by the tokenizers library",
    "use_v2_block_manager": ALONE,
    "worker_use_ray": "say --distributed-executor-backend ray",
}
SERVER = {
    "api_server_count": "one process speaks HTTP",
    "disable_fastapi_docs": "/docs shows nothing of any request",
    "disable_frontend_multiprocessing": "the engine always has a process of its own",
    "disable_log_requests": "requests are not logged unless --enable-log-requests asks for it",
    "disable_uvicorn_access_log": "say --access-log for one",
    "enable_prompt_tokens_details": "they are always in the usage",
    "enable_server_load_tracking": "/load always tells",
    "max_log_len": NO_LOG,
    "uvicorn_log_level": "say --access-log or --verbose",
}
SPECULATIVE = {  # keys of speculative_config
    "disable_padded_drafter_batch": "a drafter runs on the rows of the step",
    "enable_adaptive_verification": "drafts are dealt by what they bring, see adaptive",
    "num_speculative_tokens_per_batch_size": "drafts are dealt by what they bring, see adaptive",
    "speculative_disable_by_batch_size": "drafts are dealt by what they bring, see adaptive",
    "suffix_decoding_max_spec_factor": "each request has as many drafts as stand, see adaptive",
    "suffix_decoding_min_token_prob": "each request has as many drafts as stand, see adaptive",
    "use_local_argmax_reduction": "ranks exchange a number and a token each",
}
WITH_VALUE = {  # the others are flags
    *("block_manager", "compilation_config", "cuda_graph_sizes"),
    *("guided_decoding_backend", "limit_mm_per_prompt", "max_parallel_loading_workers", "tokenizer_mode"),
    *("max_seq_len_to_capture", "num_scheduler_steps", "swap_space"),
    *("api_server_count", "max_log_len", "uvicorn_log_level"),
}


# Options of vLLM's that cannot be obeyed and must not be passed over, and what to do instead.
UNSERVED = {
    "allowed_local_media_path": "prompts are text",
    "calculate_kv_scales": "say --kv-cache-dtype fp8; scales come with the checkpoint or are 1",
    "collect_detailed_traces": "a trace has the times of a request; say --trace-steps for those of steps",
    "config_format": "config.json is read, or what a GGUF file has in its stead",
    "cpu_offload_gb": "weights are where the model runs; quantize them (-q), or share them by -tp",
    "data_parallel_backend": "say --distributed-executor-backend",
    "data_parallel_rank": "one server speaks for all engines; on other machines run `pellucid agent`",
    "decode_context_parallel_size": "a sequence's KV lies whole in each rank, by heads; say -tp",
    "enable_ssl_refresh": "start the server again with the new certificate",
    "hf_overrides": "change config.json in a copy of the folder",
    "hf_token": "set HF_TOKEN",
    "logits_processors": "the server runs no code of a request's; say logit_bias or structured_outputs",
    "logprobs_mode": "log-probabilities are the model's own, before the sampling parameters",
    "long_prefill_token_threshold": "chunks beside streams follow from --target-itl-ms",
    "max_num_partial_prefills": "the oldest prompt goes first, in chunks",
    "media_io_kwargs": "prompts are text",
    "middleware": "put a proxy before the server",
    "mm_processor_kwargs": "prompts are text",
    "model_impl": "there is one implementation",
    "override_generation_config": "say it in requests, or change generation_config.json",
    "override_pooler_config": "change 1_Pooling/config.json in a copy of the folder",
    "prefill_context_parallel_size": "prompts are cut into chunks; say -tp",
    "response_role": "answers are the assistant's",
    "return_tokens_as_token_ids": "requests say return_tokens_as_token_ids",
    "rope_scaling": "change config.json in a copy of the folder",
    "rope_theta": "change config.json in a copy of the folder",
    "scheduler_cls": "there is one scheduler",
    "show_hidden_metrics_for_version": "all metrics are shown",
    "stream_interval": "each step's tokens are sent at once; a slow reader gets them together",
    "task": "say --runner, if anything; what a checkpoint is for is seen in it",
    "tokenizer_pool_size": "tokenizers run in threads, as many as are needed",
    "tool_parser_plugin": "say --tool-call-parser FILE.py:Class",
    "reasoning_parser_plugin": "say --reasoning-parser FILE.py:Class",
    "worker_cls": "there is one worker",
    "worker_extension_cls": "there is one worker",
}


UNSERVED_SPECULATIVE = {  # keys of speculative_config
    "attention_backend": "a drafter's layers attend as the model's do; say --attention-backend for both",
    "draft_sample_method": "drafts are drawn with the request's own temperature; leave it out",
    "kv_cache_dtype": "a drafter's KV lies in the model's pages; say --kv-cache-dtype for both",
    "max_model_len": "a drafter knows the model's texts to their end; say --max-model-len for both",
    "use_heterogeneous_vocab": "take a draft model of the same vocabulary",
}


def tell_ignored(names: Iterable[str]) -> None:
    """Say of each of these that it has no effect, and why."""
    for name in names:
        logger.warning("%s has no effect: %s", name, {**ENGINE, **SERVER, **SPECULATIVE}[name])
