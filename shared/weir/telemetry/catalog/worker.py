"""Figures of prefill and decode workers, which have the same names for the same things."""

from weir.telemetry.catalog.entry import rows

WORKER = rows(
    "worker",
    """
num_running > weir_worker_sequences_running: Sequences in the batch.
num_waiting > weir_worker_sequences_waiting: Sequences before the batch.
num_live > weir_worker_sequences_live: Sequences that it has or is to get by hand-off.
num_matching > weir_worker_prompts_matching: Prompts whose cached beginning is being asked for.
num_unclaimed > weir_worker_sequences_unclaimed: Sequences whose gateway died, kept for another one.
claimed_total > weir_worker_sequences_claimed_total: Those that another gateway claimed.
num_gateways > weir_worker_gateways: Gateways that are connected.
num_open_spans > weir_worker_open_spans: Spans that have begun.
num_held_pages > weir_worker_held_pages: Pages that the worker has.
num_free_pages > weir_worker_free_pages: Pages that it has and no sequence uses.
num_used_pages > weir_worker_used_pages: Pages that sequences hold.
num_filled_pages > weir_worker_filled_pages: Used pages that hold a computed token.
num_kept_ends > weir_worker_kept_ends: Records of ended sequences, kept until their clients know.
max_step_tokens: Prompt tokens that a step gets at most now.
max_num_seqs > weir_worker_max_sequences: Sequences that the batch takes.
max_num_batched_tokens > weir_worker_max_batched_tokens: Tokens that a step takes.
steps_total: Forward passes.
prefill_steps_total: Forward passes with a prompt token.
decode_steps_total: Forward passes with an output token.
prompt_tokens_computed_total: Prompt tokens computed.
prompt_tokens_cached_total: Prompt tokens found in pages that others had computed.
output_tokens_computed_total: Output tokens computed.
tokens_generated_total: Tokens sampled.
tokens_recomputed_total: Tokens computed again after preemption.
taken_over_total > weir_worker_sequences_taken_over_total: Sequences that came by hand-off.
adopted_total > weir_worker_sequences_adopted_total: Sequences of workers that had ended.
handed_off_total > weir_worker_sequences_handed_off_total: Sequences handed to decode workers.
handed_over_total > weir_worker_sequences_handed_over_total: Sequences given to others while it was emptied.
served_locally_total > weir_worker_sequences_served_locally_total: Sequences whose prompts it computed itself.
finished_total > weir_worker_sequences_finished_total: Sequences that ended as they should.
cancelled_total > weir_worker_sequences_cancelled_total: Sequences that were cancelled.
failed_total > weir_worker_sequences_failed_total: Sequences that were given up.
stalls_total: Times a sequence began to wait for a page or a slot.
failed_steps_total: Forward passes that failed.
preemptions_total: Sequences that gave way.
preemption_rate > weir_worker_preemption_ratio: Preemptions a sequence served, since the start; over 0.02 is too many.
preemptions_dropped_total: Those whose pages were not kept.
pages_swapped_out_total > weir_worker_swapped_out_pages_total: Pages moved to the swap file.
pages_swapped_in_total > weir_worker_swapped_in_pages_total: Pages moved back.
pages_behind_window_total: Pages given back before their sequence ended: no layer saw them any more.
swap_failures_total: Sequences whose pages came back wrong, and were computed again.
pauses_total: Times a sequence left the batch for a more urgent one.
policy_defects_total: Decisions of the policy that were impossible.
policy_choices_refused_total: Policies of the scheduler that this worker does not know.
policy_watch_failures_total: Policies that could not be followed.
held_rows_computed_total: Rows of static batches computed after their sequences had ended.
late_rows_computed_total: Rows of steps planned ahead whose sequences had ended.
page_fingerprint: A hash over all hand-offs: the same for all prefill workers as for all decode workers.
hand_offs_under_way: Hand-offs that are not answered yet.
hand_offs_refused_total: Hand-offs that nobody took.
hand_offs_in_doubt_total: Hand-offs of which it is not known.
hand_off_bytes_copied_total > weir_worker_hand_off_copied_bytes_total: Bytes copied for hand-offs; on one host none.
hand_overs_under_way: Sequences that are being given away.
hand_overs_untaken_total: Sequences that nobody took.
hand_overs_in_doubt_total: Those of which it is not known.
stagings_under_way: Sequences of other hosts whose pages are on their way to this worker.
stagings_total: Sequences of other hosts whose pages were to come to this worker.
stagings_refused_total: Those that did not, since too many were on their way.
unreadable_hand_offs_total: Sequences handed here whose records could not be read.
unwanted_hand_offs_total: Sequences handed here that nobody wanted any more.
arena_refusals_total: Calls that the transfer service refused.
arena_silences_total: Calls that the transfer service did not answer.
match_failures_total: Searches for cached beginnings that failed.
grammars_waiting: Sequences whose grammars are being compiled.
grammars_compiled_total: Grammars of answers that were compiled.
grammars_refused_total: Grammars that cannot be used.
grammar_cache_hits_total: Times a grammar was compiled already.
grammar_compile_s_total: What compiling took, those that were refused too.
grammar_masks_total: Masks of grammars: one a token.
grammar_mask_s_total: What the masks took, in a thread beside the steps.
releases_under_way: Pages that are being given back, in calls.
registry_failures_total: Entries of the registry that could not be written.
worker_rules_refused_total: Bounds of the scheduler that could not be read.
worker_rules_failures_total: Bounds of the scheduler that could not be followed.
role_changes_total: Times it went on in the other role.
is_changing_role: Whether it is about to.
is_draining: Whether it takes nothing new.
is_drained: Whether it takes nothing new and has nothing left.
step_cost_* > weir_worker_step_cost by coefficient: What a step costs, in milliseconds, and how well that fits.
gpu_utilization > weir_worker_gpu_utilization_ratio: Share of the last moments in which its GPU worked.
gpu_memory_used_bytes: Memory of its GPU in use, by whomever.
gpu_memory_total_bytes > weir_worker_gpu_memory_bytes: Memory of its GPU.
""",
)
