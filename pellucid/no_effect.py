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
    "disable_log_stats": NO_LOG,
    "distributed_executor_backend": "say executor, local or multiproc",
    "guided_decoding_backend": "there is one, xgrammar",
    "limit_mm_per_prompt": "prompts are text",
    "max_parallel_loading_workers": ALONE,
    "max_seq_len_to_capture": "graphs serve all lengths",
    "num_scheduler_steps": "steps are planned one by one, ahead of the device",
    "swap_space": "preempted requests are computed anew, nothing is swapped",
    "tokenizer_mode": "there is one, by the tokenizers library",
    "use_v2_block_manager": ALONE,
    "worker_use_ray": "workers are processes of this machine",
}
SERVER = {
    "api_server_count": "one process speaks HTTP",
    "disable_fastapi_docs": "/docs shows nothing of any request",
    "disable_frontend_multiprocessing": "the engine always has a process of its own",
    "disable_log_requests": "requests are not logged",
    "disable_uvicorn_access_log": "say --access-log for one",
    "enable_log_requests": "say --access-log",
    "enable_prompt_tokens_details": "they are always in the usage",
    "enable_server_load_tracking": "/load always tells",
    "max_log_len": NO_LOG,
    "uvicorn_log_level": "say --access-log or --verbose",
}
WITH_VALUE = {  # the others are flags
    *("block_manager", "compilation_config", "cuda_graph_sizes", "distributed_executor_backend"),
    *("guided_decoding_backend", "limit_mm_per_prompt", "max_parallel_loading_workers", "tokenizer_mode"),
    *("max_seq_len_to_capture", "num_scheduler_steps", "swap_space"),
    *("api_server_count", "max_log_len", "uvicorn_log_level"),
}


def tell_ignored(names: Iterable[str]) -> None:
    """Say of each of these that it has no effect, and why."""
    for name in names:
        logger.warning("%s has no effect: %s", name, {**ENGINE, **SERVER}[name])
