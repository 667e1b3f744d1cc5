"""Figures of gateways."""

from weir.telemetry.catalog.entry import rows

GATEWAY = rows(
    "gateway",
    """
accepted_total > weir_gateway_requests_accepted_total: Requests that were let in; each answer of several is one.
finished_total > weir_gateway_requests_finished_total: Accepted requests that ended with a whole answer.
cancelled_total > weir_gateway_requests_cancelled_total: Accepted requests that their client or their deadline ended.
failed_total > weir_gateway_requests_failed_total: Accepted requests that ended with an error.
refused_total > weir_gateway_requests_refused_total: Accepted requests that the scheduler did not take.
rejected_total > weir_gateway_requests_rejected_total: Requests that were never accepted, whatever was wrong.
rejected_*_total > weir_gateway_rejections_total by error: Requests that were never accepted, by the kind of error.
refused_*_total > weir_gateway_refusals_total by reason: Requests that the scheduler refused or gave up, by its reason.
prompts_waiting: Prompts and bodies that are long, and wait for their tenants' turns.
grammars_waiting: Requests whose grammars are being compiled.
grammars_compiled_total: Grammars of answers that were compiled.
grammars_refused_total: Grammars that cannot be used.
grammar_cache_hits_total: Times a grammar was compiled already.
grammar_compile_s_total: What compiling took, those that were refused too.
entry_refused_total > weir_gateway_entry_refused_total: Requests refused on arrival for what waits already.
entry_refused_*_total > weir_gateway_entry_refusals_total by reason: Requests refused on arrival, by what was full.
entry_waiting > weir_gateway_entry_waiting: Admitted requests that wait for their turn to be read.
entry_held > weir_gateway_entry_held: Requests that were let in and have not ended.
queue_reports_total: Reports of the scheduler's queues that were taken.
queue_report_age_s: Age of the newest report of the scheduler's queues, at most an hour.
prompt_tokens_total: Tokens of accepted prompts.
output_tokens_total: Tokens of answers that ended.
reasoning_tokens_total: Tokens of these that were reasoning, of models that mark it.
tool_calls_total: Complete calls of tools in answers that ended.
tenant_accepted_total > weir_tenant_requests_accepted_total: Accepted requests of a tenant.
tenant_finished_total > weir_tenant_requests_finished_total: Finished requests of a tenant.
tenant_refused_total > weir_tenant_requests_refused_total: Requests of a tenant that the scheduler did not take.
tenant_prompt_tokens_total > weir_tenant_prompt_tokens_total: Tokens of a tenant's accepted prompts.
tenant_output_tokens_total > weir_tenant_output_tokens_total: Tokens of a tenant's answers that ended.
lane_prompt_tokens_total > weir_lane_prompt_tokens_total: Tokens of a lane's answered prompts, added at the end.
lane_output_tokens_total > weir_lane_output_tokens_total: Tokens of a lane's answers, as they come.
labels_dropped_total > weir_labels_dropped_total: Things counted under the label "other" for want of room.
requests_in_flight: Requests that have not ended.
model_open_requests: Requests of a model that have not ended; there for each model that is served.
requests_open: Requests whose end is not confirmed, or whose output is not taken.
interruptions_total: Dispatches whose workers could not go on: each is computed again elsewhere, or fails.
adoptions_total: Sequences that another worker went on with after theirs was lost.
migrations_*_total > weir_gateway_migrations_total by outcome: Migrations to other hosts; see hosts.md.
migrations_under_way: Requests whose pages are on their way to another host.
claims_total: Sequences of gateways that died, which go on here.
claims_in_vain_total: Sequences of gateways that died, which nobody had any more.
prefix_orders_total: Prompts that workers of other hosts were asked to compute.
prefix_orders_failed_total: Those that were not computed there, and so where they are answered.
access_rules_known: Whether the rules of access have come; before, nobody is let in.
access_rules_changes_total: Times the rules of access changed.
access_rules_malformed_total: Rules of access that could not be read.
access_rules_failures_total: Rules of access that could not be followed.
scheduler_epoch: Epoch of the scheduler that leads.
stale_epochs_total: Messages of schedulers that were replaced.
reports_unanswered_total: Lists of held requests that no scheduler answered.
ends_unconfirmed_total: Ends of requests that no scheduler confirmed.
cancels_unconfirmed: Cancels that no worker has confirmed yet.
cancels_forgotten_total: Cancels that were given up.
worker_connections: Workers that are connected to, or sought.
worker_connections_open: Workers that are connected.
worker_connections_broken_total: Streams to workers that broke.
worker_connection_failures_total: Connections to workers that failed by a defect.
worker_subscriptions: Requests that wait for updates of a worker, counted once a worker.
unexpected_updates_total: Updates of workers that nobody had asked for.
malformed_frames_total: Frames of workers that could not be read.
malformed_messages_total: Messages that could not be read, by NATS and by gRPC.
registry_malformed_total: Entries of the registry that could not be read.
http_connections: Connections to the HTTP port on which something is asked.
http_connections_resting: Connections to the HTTP port on which nothing is asked.
http_connections_closed_for_others_total: Idle connections closed to make room.
http_internal_errors_total: Requests over HTTP that ended by a defect.
console_watchers: Consoles that are sent the stack's state every second.
keys_held: Idempotency keys of requests that are here.
recent_requests: Requests that have ended and are remembered for operators.
recent_request_bytes: Bytes that they take, roughly.
keys_kept: Keyed requests that are kept for a client to come back.
keys_claimed_total: Idempotency keys claimed.
keys_taken_over_total: Keys taken over from other gateways.
keys_attached_total: Clients that came back to a request that ran on.
keys_yielded_total: Keyed requests let go for another gateway.
keys_expired_total: Keyed requests that no client came back to.
keys_lost_total: Keys lost to other gateways.
keys_ends_unwritten_total: Ends of keyed requests that were not written down.
keys_malformed_total: Keys' records that could not be read.
keys_conflicts_total: Keys claimed by two at once.
keys_refused_full_total: Keys refused since their store was full.
keys_silent_gateways_total: Gateways that held a key and did not answer.
responses_kept_total: Answers of the Responses API that were kept.
responses_too_large_total: Answers too large to be kept.
responses_lost_total: Answers that could not be kept.
responses_malformed_total: Kept answers that could not be read.
batch_lines_answered_total: Lines of batches that this gateway has answered.
batch_lines_failed_total: Lines of batches that it has given an error for an answer.
batch_lines_retried_total: Lines of batches that it put back, to be tried again.
batch_lines_lost_total: Lines of batches whose answer came when they were another gateway's, or their batch had ended.
batch_ended_total: Batches that it has ended.
batch_store_failures_total: Calls of the batches' database that failed.
batch_lines_running: Lines of batches that it has answered now.
predictions_*_total > weir_gateway_predictions_total by outcome: Predictions of output lengths, by what came of them.
prediction_factor: What predictions of output lengths are multiplied by, from what answers turned out to be.
audit_*_total > weir_gateway_audit_events_total by outcome: Life events written or dropped; `failed`: attempts to write.
audit_waiting: Life events that are not written yet.
request_log_*_total > weir_gateway_request_log_records_total by outcome: Records of the request log.
""",
)
