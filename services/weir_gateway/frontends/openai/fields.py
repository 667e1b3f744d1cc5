"""What clients of OpenAI's API, of vLLM, SGLang, llama.cpp and Ollama send beyond what is served here.

Of each field the values with which it changes nothing: it is taken with these, and refused with others.
"""

from collections.abc import Mapping
from typing import Any

_OTHER_GRAMMAR = "is not served under this name: give response_format, or structured_outputs"
_NO_GRAMMAR = "is not served here; chats and completions of OpenAI's API have it"
_OLD_TOOLS = "is an older form of calls, which is not served: give tools and tool_choice"
_NO_MEDIA = "is not served: models here read and write text alone"
_NO_SUCH_SAMPLING = "is another way to draw tokens, which is not served"

# Of both kinds of request.
COMMON_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM, SGLang
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "ebnf": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "regex": (),
    "repetition_detection": (),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # llama.cpp, Ollama
    "do_sample": (),
    "dry_multiplier": (0.0,),
    "dynatemp_range": (0.0,),
    "format": ("",),
    "grammar": ("",),
    "id_slot": (-1,),
    "max_length": (),
    "max_new_tokens": (),
    "mirostat": (0,),
    "n_keep": (0, -1),
    "n_predict": (),
    "n_probs": (0,),
    "num_beams": (1,),
    "num_ctx": (),
    "num_predict": (),
    "repeat_penalty": (1.0,),
    "samplers": (),
    "top_a": (0.0,),
    "typical_p": (1.0,),
    "xtc_probability": (0.0,),
}
CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **COMMON_NEUTRAL,
    "add_special_tokens": (False,),
    "echo": (False,),
}
CHATS_REASONING: Mapping[str, tuple[Any, ...]] = {
    "include_reasoning": (True, False),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
}
"""Fields of chats, elsewhere."""
COMPLETION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {**COMMON_NEUTRAL, **CHATS_REASONING, "add_special_tokens": (True,)}

REASONS: Mapping[str, str] = {
    "audio": _NO_MEDIA,
    "modalities": _NO_MEDIA,
    "best_of": "is not served: answers are not computed only to be thrown away. Give n",
    "chat_template": "is a program, and clients' programs are not run here",
    "separate_reasoning": "is not served: reasoning is told apart wherever a model's form of it is known",
    "suffix": "is not served: models here go on with a text, they are not trained to fill one in",
    "truncate_prompt_tokens": "is not served: a prompt is answered as it was sent, or refused",
    "function_call": _OLD_TOOLS,
    "functions": _OLD_TOOLS,
    **dict.fromkeys(
        (
            "ebnf",
            "format",
            "grammar",
            "guided_choice",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "json_schema",
            "regex",
        ),
        _OTHER_GRAMMAR,
    ),
    **dict.fromkeys(("response_format", "structured_outputs"), _NO_GRAMMAR),
    **dict.fromkeys(("max_length", "max_new_tokens", "n_predict", "num_predict"), "is max_tokens here"),
    **dict.fromkeys(("repeat_penalty",), "is repetition_penalty here"),
    **dict.fromkeys(
        (
            "dry_multiplier",
            "dynatemp_range",
            "length_penalty",
            "mirostat",
            "num_beams",
            "top_a",
            "typical_p",
            "use_beam_search",
            "xtc_probability",
        ),
        _NO_SUCH_SAMPLING,
    ),
}
# Fields that never change the answer.
IGNORED = frozenset(
    {
        "client_metadata",
        "metadata",
        "moderation",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_interval",
        "timings_per_token",
        "user",
    }
)
